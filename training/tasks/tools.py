"""Tool calls: the right function of several, with exact typed arguments; and answers made from results.

Two kinds of tools. Everyday ones are written out with their own ways of asking. Invented ones combine a verb, a noun
and typed parameters at random, so that the model has to read the list instead of knowing it; held out are their names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from training.chat import Call, Turn, Value, assistant, user
from training.draw import Draw, capital, joined

NO_TOOL = "I have no tool for that."


@dataclass(frozen=True, slots=True)
class Parameter:
    """`make` draws a value; `choices` are an enumeration's."""

    name: str
    type: str
    make: Callable[[Draw], Value]
    choices: tuple[str, ...] = ()

    def schema(self) -> dict[str, object]:
        schema: dict[str, object] = {"type": self.type, "description": f"The {self.name.replace('_', ' ')}"}
        return schema | ({"enum": list(self.choices)} if self.choices else {})


@dataclass(frozen=True, slots=True)
class Tool:
    """`requests` name every parameter in braces; none for an invented tool, whose request is put together."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...] = ()

    def json(self) -> str:
        return _json(self)


@dataclass(frozen=True, slots=True)
class Request:
    """What the user says, and the call that it means."""

    text: str
    call: Call


def _one_of(kind: str) -> Callable[[Draw], Value]:
    return lambda draw: draw.word(kind)


def _choice(name: str, *choices: str) -> Parameter:
    return Parameter(name, "string", lambda draw: draw.pick(choices), choices)


def _integer(name: str, low: int, high: int) -> Parameter:
    return Parameter(name, "integer", lambda draw: draw.between(low, high))


def _number(name: str, high: int) -> Parameter:
    return Parameter(name, "number", lambda draw: draw.between(1, high * 10 - 1) / 10)


def _flag(name: str) -> Parameter:
    return Parameter(name, "boolean", lambda draw: draw.chance(0.5))


def _words(name: str, kind: str) -> Parameter:
    return Parameter(name, "string", _one_of(kind))


def _text(name: str, make: Callable[[Draw], str]) -> Parameter:
    return Parameter(name, "string", make)


def _some_words(draw: Draw, fewest: int, most: int) -> str:
    return " ".join(draw.word("plain") for _ in range(draw.between(fewest, most)))


CITY, FROM, TO = (_words(name, "city") for name in ("city", "from", "to"))
PERSON = _text("name", lambda draw: draw.person())
TIME = _text("time", lambda draw: f"{draw.between(0, 23):02}:{draw.between(0, 59):02}")
DATE = _text("date", lambda draw: f"20{draw.between(25, 35)}-{draw.between(1, 12):02}-{draw.between(1, 28):02}")
TEXT = _text("text", lambda draw: _some_words(draw, 2, 6))
QUERY = _text("query", lambda draw: _some_words(draw, 1, 4))
EMAIL = _text("address", lambda draw: f"{draw.word('first').lower()}@{draw.word('thing')}.com")
TITLE = _text("title", lambda draw: f"{draw.word('adjective')} {draw.word('thing')}")
FOLDER = _text("folder", lambda draw: f"{draw.word('place')}/{draw.word('thing')}")
PATH = _text("path", lambda draw: f"{draw.word('place')}/{draw.word('thing')}.{draw.pick(('txt', 'md', 'py', 'csv'))}")
SYMBOL = _text("symbol", lambda draw: draw.invented(1).upper() + draw.invented(1).upper())
CURRENCY = _choice("currency", "euro", "dollar", "pound", "yen")
LANGUAGE = _choice("language", "French", "German", "Spanish", "Italian")

EVERYDAY = (
    Tool("get_weather", "Get the weather of a city", (CITY, _choice("unit", "celsius", "fahrenheit")), (
        "What is the weather in {city} in {unit}?", "How is the weather in {city}? Use {unit}.",
        "Tell me the weather of {city} in {unit}.")),
    Tool("get_time", "Get the time in a city", (CITY,), (
        "What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?")),
    Tool("set_timer", "Start a timer", (_integer("minutes", 1, 180),), (
        "Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Wake me in {minutes} minutes.")),
    Tool("set_alarm", "Set an alarm", (TIME, _flag("repeat")), (
        "Set an alarm at {time} with repeat {repeat}.", "Wake me at {time}, repeat {repeat}.")),
    Tool("send_email", "Send an email", (EMAIL, TEXT), (
        "Send an email to {address} with the text {text}.", "Write to {address}: {text}.",
        "Mail {address} the text {text}.")),
    Tool("send_message", "Send a message to a person", (PERSON, TEXT), (
        "Send {name} the message {text}.", "Tell {name}: {text}.", "Message {name}: {text}.")),
    Tool("find_flight", "Find a flight", (FROM, TO, DATE), (
        "Find a flight from {from} to {to} on {date}.", "I want to fly from {from} to {to} on {date}.")),
    Tool("find_hotel", "Find a hotel", (CITY, _integer("nights", 1, 14), _integer("guests", 1, 6)), (
        "Find a hotel in {city} for {nights} nights and {guests} guests.",
        "I need a hotel in {city}, {nights} nights, {guests} guests.")),
    Tool("find_restaurant", "Find a restaurant", (CITY, _words("food", "food")), (
        "Find a restaurant in {city} that serves {food}.", "Where can I eat {food} in {city}?")),
    Tool("play_song", "Play music", (TITLE, _integer("volume", 0, 100)), (
        "Play {title} at volume {volume}.", "Play the song {title}, volume {volume}.")),
    Tool("set_light", "Set a lamp", (_words("room", "place"), _words("colour", "colour"), _flag("on")), (
        "Set the light in the {room} to {colour}, on {on}.", "Make the {room} light {colour}, on {on}.")),
    Tool("set_temperature", "Set the heating", (_words("room", "place"), _number("degrees", 30)), (
        "Set the {room} to {degrees} degrees.", "Heat the {room} to {degrees} degrees.")),
    Tool("convert_currency", "Convert money", (_number("amount", 1000), CURRENCY), (
        "Convert {amount} to {currency}.", "How much is {amount} in {currency}?", "Change {amount} into {currency}.")),
    Tool("calculate", "Compute with two numbers", (_integer("a", 0, 99999), _integer("b", 0, 99999),
        _choice("operation", "add", "subtract", "multiply", "divide")), (
        "Use the calculator to {operation} {a} and {b}.", "Please {operation} {a} and {b} with the tool.")),
    Tool("search", "Search the web", (QUERY, _integer("limit", 1, 20)), (
        "Search for {query}, limit {limit}.", "Search the web for {query} with limit {limit}.")),
    Tool("add_event", "Add an event to the calendar", (TEXT, DATE, TIME), (
        "Add {text} on {date} at {time} to my calendar.", "Put {text} into the calendar on {date} at {time}.")),
    Tool("order_food", "Order food", (_words("item", "food"), _integer("count", 1, 20)), (
        "Order {count} times {item}.", "I want to order {item}, {count} times.")),
    Tool("read_file", "Read a file", (PATH,), (
        "Read the file {path}.", "Show me {path}.", "What is in {path}?", "Open {path}.")),
    Tool("delete_file", "Delete a file", (PATH,), (
        "Delete the file {path}.", "Delete {path}.", "Remove the file {path}.")),
    Tool("list_files", "List the files of a folder", (FOLDER,), (
        "List the files in {folder}.", "Which files are in {folder}?")),
    Tool("translate", "Translate a text", (TEXT, LANGUAGE), (
        "Translate {text} into {language} with the tool.", "Use the tool to put {text} into {language}.")),
    Tool("get_stock_price", "Get the price of a share", (SYMBOL,), (
        "What is the price of {symbol}?", "How much is a share of {symbol}?")),
    Tool("book_table", "Book a table", (PERSON, _integer("guests", 1, 12), TIME), (
        "Book a table for {name}, {guests} guests at {time}.", "Reserve a table for {guests} at {time}, name {name}.")),
    Tool("roll_dice", "Roll dice", (_integer("count", 1, 10), _integer("sides", 4, 20)), (
        "Roll {count} dice with {sides} sides.", "Throw {count} dice of {sides} sides.")),
    Tool("list_users", "List all users", (), (
        "List all users.", "Who are the users?", "Show all users.")),
    Tool("get_status", "Get the status of the system", (), (
        "What is the status?", "Show the status.", "Is the system up?")),
)  # fmt: skip

INVENTED_PARAMETERS = (
    _words("colour", "colour"), _words("city", "city"), _words("animal", "animal"), _words("owner", "first"),
    _words("place", "place"), _words("material", "thing"), _words("day", "day"), _words("month", "month"),
    _words("label", "plain"), _words("topic", "abstract"), _words("target", "thing"), _words("food", "food"),
    Parameter("code", "string", lambda draw: draw.invented(2)), TIME, DATE, PERSON, TEXT,
    _integer("count", 1, 99), _integer("size", 1, 500), _integer("level", 0, 10), _integer("width", 1, 2000),
    _integer("year", 1900, 2099), _integer("id", 1, 99999), _integer("limit", 1, 100),
    _number("weight", 100), _number("price", 500), _number("speed", 200), _number("ratio", 1),
    _flag("urgent"), _flag("visible"), _flag("loud"), _flag("final"),
    _choice("mode", "fast", "slow", "safe"), _choice("priority", "low", "medium", "high"),
    _choice("shape", "round", "square", "flat"), _choice("format", "text", "table", "json"),
)  # fmt: skip
OPENERS = ("", "Please ", "Can you ", "I want you to ", "Could you ", "Now ")
RESULT_KEYS = ("status", "result", "id", "total", "place", "owner", "time", "state", "message", "code")


@lru_cache(maxsize=50_000)
def _json(tool: Tool) -> str:
    properties = {parameter.name: parameter.schema() for parameter in tool.parameters}
    parameters = {"type": "object", "properties": properties, "required": [p.name for p in tool.parameters]}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return json.dumps({"type": "function", "function": function})


def invented_tool(draw: Draw) -> Tool:
    """A tool whose name belongs to this split."""
    verb, noun = draw.until_mine(lambda: (draw.word("verb"), draw.word("thing")), "_".join)
    parameters = tuple(draw.some(INVENTED_PARAMETERS, draw.between(0, 4)))
    return Tool(f"{verb}_{noun}", f"{capital(verb)} the {noun}", parameters)


def some_tools(draw: Draw, most: int = 6) -> list[Tool]:
    """Of one kind or mixed, none twice."""
    count = draw.between(1, most)
    everyday = draw.pick((0, count, draw.between(0, count)))
    tools = draw.some(EVERYDAY, everyday)
    names = {tool.name for tool in tools}
    while len(tools) < count:
        tool = invented_tool(draw)
        if tool.name not in names:
            tools.append(tool)
            names.add(tool.name)
    return draw.shuffled(tools)


def request(draw: Draw, tool: Tool) -> Request:
    """A wish with every argument in it, held apart by its values."""
    if tool.requests and tool.parameters:
        return draw.until_mine(lambda: _everyday_request(draw, tool), lambda request: request.text)
    return _everyday_request(draw, tool) if tool.requests else _invented_request(draw, tool)


def call_turns(draw: Draw, tools: Sequence[Tool], num_calls: int) -> list[Turn]:
    """A user's wish and the call or calls that it needs."""
    chosen = draw.some(tools, num_calls) if draw.chance(0.7) else [draw.pick(tools)] * num_calls
    requests = [request(draw, tool) for tool in chosen]
    text = requests[0].text
    for other in requests[1:]:
        text += draw.pick((" ", " And ", " Also: ", "\n")) + other.text
    names = joined([tool.name for tool in chosen])
    thought = f"I call {names}."
    return [user(text), assistant("", thought, calls=[request.call for request in requests])]


def result_turns(draw: Draw, num_results: int) -> list[Turn]:
    """Results of as many calls, and the sentence that tells them."""
    turns, sentences = [], []
    for _ in range(num_results):
        result = _result(draw)
        turns.append(Turn("tool", json.dumps(result)))
        sentences.append(capital(joined([f"the {key} is {_shown(value)}" for key, value in result.items()])) + ".")
    return [*turns, assistant(" ".join(sentences), "I tell the result.")]


def decline_turns(draw: Draw, tools: Sequence[Tool]) -> list[Turn]:
    """A wish that none of the tools fulfils."""
    names = {tool.name for tool in tools}
    other = draw.pick(EVERYDAY)
    while other.name in names or draw.chance(0.5):
        other = invented_tool(draw)
    return [user(request(draw, other).text), assistant(NO_TOOL, "No tool fits.")]


def wish_exchange(draw: Draw) -> list[Turn]:
    """An everyday wish where no tools are given."""
    return [user(request(draw, draw.pick(EVERYDAY)).text), assistant(NO_TOOL, "There is no tool.")]


def _everyday_request(draw: Draw, tool: Tool) -> Request:
    values = {parameter.name: parameter.make(draw) for parameter in tool.parameters}
    text = draw.pick(tool.requests).format_map({name: _shown(value) for name, value in values.items()})
    return Request(text, Call(tool.name, values))


def _invented_request(draw: Draw, tool: Tool) -> Request:
    """Says name and value of each parameter, in any order."""
    values = {parameter.name: parameter.make(draw) for parameter in tool.parameters}
    joint = draw.pick(("with {} {}", "{}: {}", "the {} is {}", "{} = {}", "{} {}"))
    said = [joint.format(name.replace("_", " "), _shown(value)) for name, value in values.items()]
    verb, noun = tool.name.split("_", 1)
    opener = draw.pick(OPENERS)
    text = capital(f"{opener}{verb} the {noun.replace('_', ' ')}")
    said = draw.shuffled(said)
    if said:
        text += draw.pick((" ", ", ", ": ")) + ", ".join(said)
    return Request(text + ("?" if opener.startswith("C") else "."), Call(tool.name, values))


def _result(draw: Draw) -> dict[str, Value]:
    makers: tuple[Callable[[Draw], Value], ...] = (
        lambda d: d.word("plain"),
        lambda d: d.between(0, 9999),
        lambda d: d.word("city"),
        lambda d: d.between(1, 999) / 10,
        lambda d: d.person(),
        lambda d: d.invented(2),
        lambda d: d.chance(0.5),
    )
    return {key: draw.pick(makers)(draw) for key in draw.some(RESULT_KEYS, draw.between(1, 3))}


def _shown(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)
