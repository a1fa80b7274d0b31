class Mute(Exception):
    def __str__(self):
        raise RuntimeError


raise Mute
