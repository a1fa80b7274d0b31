def eplb_register_backends(:
