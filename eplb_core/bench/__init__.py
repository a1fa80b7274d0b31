"""What ``eplb demo`` runs: published geometries, contents that can be checked, ranks as processes."""
