"""The evidence: receipts, gates, signing, SBOM, repack, publish."""
