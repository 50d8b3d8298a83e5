"""Whether the server lives and whether it is ready: what kubelets and balancers ask."""

from serve.errors import NotReadyError
from serve.models.served import Shelf
from serve.operations.draining import Draining


class Vitals:
    """The state of a server, asked by every protocol's probes.

    Args:
        shelf: The models.
        draining: Whether the server is on its way out.
        hung_after_s: Seconds of one batch after which an engine counts as hung.
    """

    def __init__(self, shelf: Shelf, draining: Draining, hung_after_s: float) -> None:
        self._shelf, self._draining, self._hung_after_s = shelf, draining, hung_after_s

    def check_alive(self) -> None:
        """Pass while every engine gets on; that the event loop turns is shown by the answer itself.

        Raises:
            NotReadyError: If one hangs or its thread has ended: nothing but a restart helps.
        """
        if not self._shelf.is_alive:
            raise NotReadyError("an engine's thread has ended")
        if self._shelf.busy_s > self._hung_after_s:
            raise NotReadyError("an engine has not ended its batch for too long")

    def check_ready(self) -> None:
        """Pass while every model answers and the server means to stay.

        Raises:
            NotReadyError: If it is going down, or has no model, or an engine hangs.
        """
        if self._draining.began:
            raise NotReadyError("the server is going down")
        self.check_alive()
        if not self._shelf.is_ready:
            raise NotReadyError("a model is still being loaded")
