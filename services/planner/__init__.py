"""How many workers each pool needs: profile, decision, adapter to Serve, simulator."""
