"""Use of trained runs: load their model and tokenizer, evaluate them and predict with them."""
