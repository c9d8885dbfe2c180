"""Puts routers and worker groups together on Ray: configuration, Serve application, CLI."""
