"""Text and tokens: tokenizer, chat template, detokenizer, stop strings. Imports no torch."""
