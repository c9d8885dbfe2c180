"""Text and tokens: tokenizer, chat template, detokenizer and stop strings. Does not import
torch."""
