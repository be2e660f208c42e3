"""The thread that steps an engine while there is work. Requests of any thread reach the engine through it."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable

from specdec.engine import Engine

_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is inside torch while Python shuts down aborts the process."""
    for worker in list(_workers):
        worker.close()


class Worker:
    """Runs `engine.step()` in a thread of its own, started with the first piece of work.

    on_failure: called in that thread with the exception if a step itself fails; the worker then takes no more work. The
    thread keeps it, so it must hold nothing that is to be collected while the thread waits.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[BaseException], None]):
        self.engine, self.on_failure = engine, on_failure
        self.failure: BaseException | None = None
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._then: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        _workers.add(self)

    def do(self, order: Callable[[], None]) -> None:
        """Run `order` between two steps. Raises RuntimeError once closed, or after a failed step."""
        with self._wake:
            if self._closed:
                raise RuntimeError("the LLM is closed")
            if self.failure:
                raise RuntimeError(f"the engine stopped after an error: {self.failure!r}") from self.failure
            self._orders.append(order)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
                self._thread.start()
            self._wake.notify()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def inside(self) -> bool:
        """Whether the caller runs in the worker's own thread, where waiting for it would never end."""
        return self._thread is threading.current_thread()

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """End the thread after the orders that it already has; running sequences are left where they are.

        then: run once it has ended; called from the thread itself, it ends only after the step that it is in.
        """
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self.inside:
            self._then = then
            return
        if self._thread:
            self._thread.join()
        then()

    def _run(self) -> None:
        try:
            while self._wait():
                self.engine.step()
        except BaseException as error:
            with self._wake:  # no order comes in any more; those that did and were not carried out belong to the failed
                self.failure = error
                self._orders.clear()
            self.on_failure(error)
        self._then()

    def _wait(self) -> bool:
        """Carry out the orders; wait while there is nothing to do. False once closed."""
        while True:
            with self._wake:
                while not self._orders and self.engine.idle and not self._closed:
                    self._wake.wait()
                orders, closed = list(self._orders), self._closed
                self._orders.clear()
            while orders:  # none is held while the thread waits: it may hold the LLM
                orders.pop(0)()
            if closed:
                return False
            if not self.engine.idle:
                return True
