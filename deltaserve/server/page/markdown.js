// Markdown to DOM nodes: headings, lists, quotes, fenced code, and code, bold, italics and links inside lines.
// Text only ever becomes text nodes, so nothing a model writes can turn into markup.

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*(\d+)[.)]\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/;

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

export function inline(text) {
  const nodes = [];
  for (let match = INLINE.exec(text); match; match = INLINE.exec(text)) {
    if (match.index) nodes.push(text.slice(0, match.index));
    const [whole, , code, bold, italic, label, address] = match;
    if (code !== undefined) nodes.push(element("code", code));
    else if (bold !== undefined) nodes.push(element("strong", ...inline(bold)));
    else if (italic !== undefined) nodes.push(element("em", ...inline(italic)));
    else {
      const link = element("a", label);
      Object.assign(link, { href: address, target: "_blank", rel: "noopener noreferrer" });
      nodes.push(link);
    }
    text = text.slice(match.index + whole.length);
  }
  if (text) nodes.push(text);
  return nodes;
}

// Consecutive lines that match `pattern`, from `start` on; the last group of the pattern is kept.
function run(lines, start, pattern) {
  const taken = [];
  while (start + taken.length < lines.length) {
    const match = pattern.exec(lines[start + taken.length]);
    if (!match) break;
    taken.push(match[match.length - 1]);
  }
  return taken;
}

function codeBlock(lines, start) {
  const mark = FENCE.exec(lines[start])[1];
  let end = start + 1;
  while (end < lines.length && !lines[end].trim().startsWith(mark)) end += 1;
  return [element("pre", element("code", lines.slice(start + 1, end).join("\n"))), end + 1 - start];
}

function list(lines, start, pattern, name) {
  const items = run(lines, start, pattern);
  const node = element(name, ...items.map((item) => element("li", ...inline(item))));
  if (name === "ol") node.start = Number(NUMBER.exec(lines[start])[1]);
  return [node, items.length];
}

function paragraph(lines, start) {
  let end = start + 1;
  const stops = [FENCE, HEADING, BULLET, NUMBER, QUOTE];
  while (end < lines.length && lines[end].trim() && !stops.some((pattern) => pattern.test(lines[end]))) end += 1;
  const node = element("p");
  lines.slice(start, end).forEach((line, index) => node.append(...(index ? [element("br")] : []), ...inline(line)));
  return [node, end - start];
}

// The node that begins at line `start`, and how many lines it takes.
function block(lines, start) {
  const line = lines[start];
  if (FENCE.test(line)) return codeBlock(lines, start);
  const heading = HEADING.exec(line);
  if (heading) return [element(`h${Math.min(heading[1].length + 1, 4)}`, ...inline(heading[2])), 1];
  if (BULLET.test(line)) return list(lines, start, BULLET, "ul");
  if (NUMBER.test(line)) return list(lines, start, NUMBER, "ol");
  if (QUOTE.test(line)) {
    const quoted = run(lines, start, QUOTE);
    return [element("blockquote", ...markdown(quoted.join("\n"))), quoted.length];
  }
  return paragraph(lines, start);
}

export function markdown(text) {
  const lines = text.split("\n");
  const nodes = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [node, taken] = block(lines, at);
    nodes.push(node);
    at += taken;
  }
  return nodes;
}
