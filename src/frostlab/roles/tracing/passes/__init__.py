"""The watched forward pass: its inputs, a small copy to run, and a trace of its operations."""
