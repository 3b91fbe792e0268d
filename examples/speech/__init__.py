"""The speech training example: DeepSpeech models with CTC, in mixed precision."""
