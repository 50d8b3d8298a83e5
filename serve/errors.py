"""What a request can do wrong, and the one table from error type to HTTP status.

ServeError
├── MalformedError     the body is not what its content type says, or not of the protocol's form: 400
├── TooLargeError      more bytes or more images than one request may have: 413
├── MediaTypeError     a content type that is not read here: 415
├── TensorError        numbers of another shape, or not finite: 422
└── LocateError        no such model, alias, version or tracking server; met at the start, never in a request

zoo's ImageError (bytes that are no image within the limits) is 422 too. Everything else is our own fault: 500.
"""

from zoo.errors import ImageError


class ServeError(ValueError):
    """Something the client or the operator gave does not fit; the message says what, never echoing the input."""


class MalformedError(ServeError):
    """A body that is not what its content type says, or not of the protocol's form."""


class TooLargeError(ServeError):
    """A request beyond the limits."""


class MediaTypeError(ServeError):
    """A content type that is not read here."""


class TensorError(ServeError):
    """Numbers of another shape than the model's input, or not finite."""


class LocateError(ServeError):
    """A model that cannot be found or fetched."""


STATUSES: dict[type[ValueError], tuple[int, str]] = {
    MalformedError: (400, "malformed"),
    TooLargeError: (413, "too_large"),
    MediaTypeError: (415, "unsupported_media_type"),
    ImageError: (422, "bad_image"),
    TensorError: (422, "bad_tensor"),
}
