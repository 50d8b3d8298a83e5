"""What a client can meet."""


class ClientError(RuntimeError):
    """No prediction for an image; the message says why, in one line.

    Args:
        message: What happened.
        status: The HTTP status of the last answer; None if there was none.
        concerns_all: Whether every other image would meet the same: no such model, no key, nobody there.
    """

    def __init__(self, message: str, *, status: int | None = None, concerns_all: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.concerns_all = concerns_all
