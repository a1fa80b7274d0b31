"""The ``nixl`` backend of eplb-core: expert weights by one-sided NIXL reads, zero-copy or staged."""
