"""The recipe of the small model in `models/tiny`: data, training, export and evaluation.

Every text that the model sees is written by the generators here, from word lists, facts and templates in
`knowledge/`; nothing is downloaded or taken from elsewhere.
"""
