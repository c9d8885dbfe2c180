"""`rayfleet bench chaos`: processes of a fleet are killed and stopped under load, all day long."""
