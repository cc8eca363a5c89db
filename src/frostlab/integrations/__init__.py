"""Callbacks for Hugging Face and Lightning trainers, and TensorBoard output."""
