"""The metadata service's decisions: which requests are valid, which sessions are open, what a watch has missed."""
