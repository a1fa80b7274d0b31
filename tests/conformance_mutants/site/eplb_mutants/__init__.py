"""Faulty backends, each one override away from the backend that `eplb new-backend` writes."""
