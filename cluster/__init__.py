"""Assembles gateways and worker groups on Ray: configuration, Serve application, CLI."""
