"""What a request can do wrong, and the one table from error type to HTTP status.

ServeError
├── MalformedError     the body is not what its content type says, or not of the protocol's form: 400
├── KeyRefusedError    no API key, or none that is known: 401
├── UnknownModelError  a model or version that is not served here: 404
├── SlowBodyError      a body that does not arrive in time: 408
├── TooLargeError      more bytes, rows or depth than one request may have: 413
├── MediaTypeError     a content type that is not read here: 415
├── TensorError        numbers of another shape or type, or not finite: 422
├── RateError          more requests than one client may send: 429, with Retry-After
├── QueueFullError     no room left, try again: 503, with Retry-After
├── NotReadyError      a probe's answer while the server cannot take requests: 503, with Retry-After
├── DeadlineError      no answer in time: 504
├── SettingsError      a flag or variable that does not fit; met at the start, never in a request
├── KeyFileError       a file of API keys that cannot be used; met at the start, never in a request
├── EngineError        an engine that is not installed here, or cannot run a bundle; met at a load, never in a request
└── LocateError        no such model, alias, version or tracking server; met at a load, never in a request
    └── OutOfReachError    the tracking server does not answer

zoo's ImageError (bytes that are no image within the limits) is 422 too. Everything else is our own fault: 500.
"""

from zoo.errors import ImageError


class ServeError(ValueError):
    """Something the client or the operator gave does not fit; the message says what, never echoing the input."""


class MalformedError(ServeError):
    """A body that is not what its content type says, or not of the protocol's form."""


class KeyRefusedError(ServeError):
    """No API key, or none that is known."""


class UnknownModelError(ServeError):
    """A model or version that is not served here."""


class SlowBodyError(ServeError):
    """A body that does not arrive in time."""


class TooLargeError(ServeError):
    """A request beyond the limits."""


class MediaTypeError(ServeError):
    """A content type that is not read here."""


class TensorError(ServeError):
    """Numbers of another shape than the model's input, or not finite."""


class RetryError(ServeError):
    """A request that may be sent again.

    Args:
        message: What is refused, and why.
        retry_after_s: Whole seconds after which to try again.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateError(RetryError):
    """More requests than one client may send."""


class QueueFullError(RetryError):
    """No room left."""


class NotReadyError(RetryError):
    """The server cannot take requests now."""


class DeadlineError(ServeError):
    """No answer in time."""


class SettingsError(ServeError):
    """A flag or variable that does not fit."""


class KeyFileError(ServeError):
    """A file of API keys that cannot be used."""


class EngineError(ServeError):
    """An engine that is not installed here, or cannot run a bundle."""


class LocateError(ServeError):
    """A model that cannot be found or fetched."""


class OutOfReachError(LocateError):
    """The tracking server does not answer: what is loaded stays as good as it was."""


STATUSES: dict[type[ValueError], tuple[int, str]] = {
    MalformedError: (400, "malformed"),
    KeyRefusedError: (401, "key_refused"),
    UnknownModelError: (404, "unknown_model"),
    SlowBodyError: (408, "slow_body"),
    TooLargeError: (413, "too_large"),
    MediaTypeError: (415, "unsupported_media_type"),
    ImageError: (422, "bad_image"),
    TensorError: (422, "bad_tensor"),
    RateError: (429, "too_many_requests"),
    QueueFullError: (503, "queue_full"),
    NotReadyError: (503, "not_ready"),
    DeadlineError: (504, "deadline"),
}
