class StopAll(BaseException):
    pass


raise StopAll("at once")
