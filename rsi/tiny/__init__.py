"""The embedded default: task families, imperfect transcripts, tokenizer and pretraining."""
