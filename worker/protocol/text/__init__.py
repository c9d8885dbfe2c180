"""Text and tokens: tokenizer, chat template, detokenizer and stop strings. Imports no torch."""
