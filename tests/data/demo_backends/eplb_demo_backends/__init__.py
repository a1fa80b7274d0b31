"""Backends for the demo's tests: one that moves rows through the store, and four that fail in one way each."""
