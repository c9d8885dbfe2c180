"""Supervisor (guard) of HAProxy: restarts HAProxy if it exits or hangs.

Serve's HAProxy manager starts one guard for its first configuration, and one for each later
configuration, which takes over from the previous guard. A guard supervises one HAProxy, with the
configuration that it was started with. `cluster.haproxy_parent` is its parent, which restarts it:

- If HAProxy exits unexpectedly, it is restarted immediately. If it keeps failing, it is restarted
  after delays that double.
- If HAProxy hangs (no response on its socket within HUNG_S), it is killed and restarted.
- The node's replicas are watched as well (`cluster.stopped_replicas`).
- If Serve's manager is killed, HAProxy keeps serving with its last configuration. The next manager
  starts with a configuration without routes, which is never loaded: its guard adopts the running
  guard, and answers the manager in that guard's place until there is a configuration with routes.
- When the Ray node's raylet exits, guard and HAProxy exit. If the guard finds no raylet, they exit
  with the guard's parent, which exits with Serve's manager.
- Serve stops HAProxy by sending SIGKILL to the guard's parent, and then stops the manager. If the
  manager still runs after STOP_S, the signal was not Serve's, and HAProxy keeps running. The
  manager can no longer reload HAProxy, as the process that it started has ended. The guard
  therefore kills the manager; Serve starts another one, whose guard adopts this one.

Serve treats the parent as HAProxy: it expects the parent's process id in responses of the admin
socket and sends signals to the parent, which forwards them. So the guard listens on the admin
socket, forwards commands to HAProxy's own socket, and replaces the process id in the responses.

Files next to the admin socket: PID.cfg is the configuration of guard PID, and PID.sock is the
socket of its HAProxy. Both are links if the guard has adopted another guard. Links to both are
named after the process id of the guard's parent.

Not reported upstream. Needed until Serve itself restarts a HAProxy that exits or hangs, and a new
manager takes over the HAProxy of the previous one. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.haproxy_admin import ADOPT, ANSWER_TIMEOUT_S, INFO, connect, process_id, query, receive
from cluster.stopped_replicas import StoppedReplicas

RAYLET_VARIABLE = "RAY_RAYLET_PID"
"""Ray's environment variable with the raylet's process id, set for all processes of the node."""
PR_SET_PDEATHSIG = 1
POLL_S = 0.02
"""Seconds between checks of whether a new HAProxy responds."""
CHECK_PERIOD_S = 1.0
"""Seconds between checks of HAProxy and of replicas. A check takes about 0.5 ms of CPU time."""
HUNG_S = 3.0
"""Seconds without a response after which HAProxy is killed. It responds within milliseconds, and
within 0.1 s on a machine with ten times as many busy threads as cores."""
START_S = 10.0
"""Seconds without a response after which a HAProxy that does not listen on its socket yet is
killed; longer than HUNG_S, since HAProxy starts slowly on a busy machine."""
FIRST_TRIES = 3
"""Maximum number of attempts to start a HAProxy that takes over from another one, which may still
be starting or exiting."""
LONG_RUN_S = 1.0
"""Minimum uptime in seconds after which an exit of HAProxy is not a failed start: HAProxy is
restarted after the shortest delay, as after a kill."""
STOP_S = 1.0
"""Seconds within which Serve's manager exits if Serve has stopped HAProxy. This takes milliseconds:
the controller kills the manager as soon as the manager has killed HAProxy."""
ADOPTION_S = 120.0
"""Seconds after which a guard exits if it has killed its manager and was not adopted: Serve no
longer runs HAProxy on this node. A manager starts within 10 s (60 s on a busy machine)."""
SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 10.0
STOPPING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""Signals that stop HAProxy; the first lets it finish its streams."""
LINKED = ("sock", "cfg")
"""Suffixes of files that also have a link named after the parent's process id."""
SUFFIXES = (*LINKED, "tmp")
"""Suffixes of files that are named after a guard's process id; the last is renamed to the admin
socket once it listens."""
ADMIN_SOCKET = re.compile(r"(?m)^(\s*stats socket )(\S+)")


def can_guard(configuration: str) -> bool:
    """Whether the configuration names an admin socket, and the kernel has pidfds (Linux 5.3)."""
    if ADMIN_SOCKET.search(configuration) is None:
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it exits."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Guard:
    """Supervisor of one HAProxy process: its own child, or the child of a guard that it has
    adopted.

    Args:
        binary: path of the HAProxy binary.
        arguments: command-line arguments that Serve gives to HAProxy.
        configuration: text of the configuration file in `arguments`.
        parent: process id of this process's parent.
        manager: process id of Serve's manager; None if it has ended.
        is_restart: whether this guard replaces one that was killed.
    """

    def __init__(
        self,
        binary: str,
        arguments: list[str],
        configuration: str,
        *,
        parent: int,
        manager: int | None,
        is_restart: bool,
    ) -> None:
        found = ADMIN_SOCKET.search(configuration)
        assert found is not None
        self._pid = os.getpid()
        self._known_pid = parent
        """Process id by which Serve and other guards know this guard: the parent's, until the
        parent is killed."""
        self._manager = manager
        self._manager_pidfd: int | None = None
        self._manager_ended_at = -math.inf
        self._deadline: tuple[float, Callable[[], None]] | None = None
        """Time of the next action after the parent's exit, and the action."""
        self._admin = Path(found[2])
        self._configuration = configuration
        options, self._old = split_arguments(arguments)
        if is_restart:  # those have been replaced, and other processes may have their ids
            self._old = []
        self._is_restart = is_restart
        options[options.index("-f") + 1] = str(self._file("cfg"))
        self._command = [binary, *options]
        self._selector = selectors.DefaultSelector()
        self._kept: list[socket.socket] = []
        self._target: int | None = None
        """pidfd of HAProxy, or of the adopted guard."""
        self._child = 0
        self._is_new = True
        self._is_stopping = False
        self._tries = 0
        self._pause_s = 0.0
        self._started_at = 0.0
        self._start_at: float | None = None
        self._status: int | None = None
        self._question: socket.socket | None = None
        """Connection of the check that waits for HAProxy's response."""
        self._next_check = 0.0
        self._replicas = StoppedReplicas(raylet_id())
        self._unanswered_since: float | None = None
        self._has_started = False
        """Whether this HAProxy has started to listen on its socket."""

    def run(self) -> int:
        """Runs HAProxy until it has exited and is not restarted; returns the exit status."""
        try:
            handle_signals(self._stop)
            self._watch_ancestors()
            self._sweep()
            if not self._adopt():
                self._write_configuration()
                self._start_at = 0.0
            while (status := self._step()) is None:
                pass
            return status
        finally:
            self._clean_up()

    def _step(self) -> int | None:
        """Waits for an event and handles it; returns the exit status once it is known."""
        before = time.monotonic()
        timeout = self._timeout_s(before)
        events = self._selector.select(timeout) if self._status is None else []
        if timeout is not None and time.monotonic() > before + timeout + CHECK_PERIOD_S:
            # This process was stopped or starved, and HAProxy perhaps as well.
            self._unanswered_since = None
            self._replicas.forget()
        for key, _ in events:
            key.data()
        if self._deadline is not None and time.monotonic() >= self._deadline[0]:
            self._deadline[1]()
        if self._status is not None:
            return self._status
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self._start()
        elif self._is_new and self._child and query(self._file("sock"), INFO):
            self._is_new = False
            self._has_started = True
            self._listen()
        elif self._is_checked:
            self._check()
        return self._status

    def _timeout_s(self, now: float) -> float | None:
        """Seconds until the next timed action; None if there is none."""
        due = [self._deadline[0]] if self._deadline is not None else []
        if self._start_at is not None:
            due.append(self._start_at)
        elif self._is_new:
            due.append(now + POLL_S)
        elif self._is_checked:
            due.append(self._next_check)
        return max(0.0, min(due) - now) if due else None

    @property
    def _is_checked(self) -> bool:
        """Whether HAProxy is running and should respond. While it finishes its streams, its socket
        is closed."""
        return bool(self._child) and not self._is_new and not self._is_stopping

    def _check(self) -> None:
        """Kills HAProxy if it has not responded for too long; sends the next query if it is due."""
        now = time.monotonic()
        if self._patience_s <= 0.0:
            waited_s = now - (self._unanswered_since or now)
            _log(f"killing HAProxy: no response for {waited_s:.1f} s")
            self._forget_question()
            assert self._target is not None
            signal.pidfd_send_signal(self._target, signal.SIGKILL)
            self._unanswered_since = None
        elif now >= self._next_check:
            self._next_check = now + CHECK_PERIOD_S
            self._replicas.check(now)
            if self._unanswered_since is None:
                self._unanswered_since = now
            if self._question is None:
                self._send_query()

    @property
    def _patience_s(self) -> float:
        """Remaining seconds for HAProxy to respond."""
        limit = HUNG_S if self._has_started else START_S
        if self._unanswered_since is None:
            return limit
        return self._unanswered_since + limit - time.monotonic()

    def _send_query(self) -> None:
        question = socket.socket(socket.AF_UNIX)
        question.setblocking(False)  # the queue of one that hangs may be full
        try:
            question.connect(str(self._file("sock")))
            question.sendall(INFO + b"\n")
        except OSError as error:
            self._has_started |= isinstance(error, BlockingIOError)
            question.close()
            return
        self._has_started = True
        self._question = question
        self._on_readable(question.fileno(), self._receive_answer)

    def _receive_answer(self) -> None:
        assert self._question is not None
        with contextlib.suppress(OSError):
            if self._question.recv(2**16):
                self._unanswered_since = None
        self._forget_question()

    def _forget_question(self) -> None:
        if self._question is not None:
            self._selector.unregister(self._question.fileno())
            self._question.close()
            self._question = None

    def _start(self) -> None:
        self._start_at = None
        was_stopping = self._is_stopping
        if was_stopping:
            self._status = 0
            return
        others = self._take_over() if self._is_new else []
        self._started_at = time.monotonic()
        self._forget_question()
        self._has_started, self._unanswered_since = False, None
        self._next_check = self._started_at + CHECK_PERIOD_S
        self._child = _spawn([*self._command, *others])
        self._target = os.pidfd_open(self._child)
        self._on_readable(self._target, self._reap)
        if self._is_stopping:  # meanwhile
            self._stop(signal.SIGUSR1)

    def _take_over(self) -> list[str]:
        """Arguments for HAProxy that take over the sockets of older processes, and let these finish
        their streams."""
        if not self._old:
            return []
        sockets = (self._file("sock", pid) for pid in self._old)
        answering = next((path for path in sockets if query(path, INFO)), None)
        given = ["-x", str(answering)] if answering is not None else []
        return [*given, "-sf", *map(str, self._old)]

    def _reap(self) -> None:
        self._forget_target()
        _, status = os.waitpid(self._child, 0)
        code = os.waitstatus_to_exitcode(status)
        self._child = 0
        if self._is_stopping:
            self._status = max(code, 0)
            return
        if self._is_new and not self._is_restart:
            self._tries += 1
            if not self._old or self._tries == FIRST_TRIES:
                self._status = code if code > 0 else 1
                return
        ran_s = time.monotonic() - self._started_at
        if ran_s >= LONG_RUN_S or code == -signal.SIGKILL:
            self._pause_s = SHORTEST_PAUSE_S
        else:
            self._pause_s = min(max(2 * self._pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        self._start_at = time.monotonic() + self._pause_s
        _log(f"HAProxy exited after {ran_s:.1f} s ({code}): restarting in {self._pause_s:.2f} s")

    def _adopt(self) -> bool:
        """Adopts the running guard if its configuration has routes and this guard's has none;
        returns whether it did."""
        if self._old:
            return False
        other = process_id(query(self._admin, INFO))
        if other is None:
            return False
        self._old = [other]
        with contextlib.suppress(OSError):
            theirs = self._file("cfg", other).read_text()
            if has_routes(self._configuration) or not has_routes(theirs):
                return False
            connection = connect(self._admin)
            self._kept.append(connection)
            connection.sendall(ADOPT + b"\n")
            guard = int(connection.recv(64) or 0)
            if not guard:
                return False
            self._target = os.pidfd_open(guard)
            self._on_readable(self._target, self._end)
            for suffix in LINKED:
                self._file(suffix).symlink_to(f"{guard}.{suffix}")
            self._link()
            self._listen()
            self._is_new = False
            _log(f"the configuration has no routes yet: keeping the HAProxy of process {other}")
            return True
        return False

    def _listen(self) -> None:
        """Listens on a socket for its owner only, which atomically replaces the admin socket."""
        listener = socket.socket(socket.AF_UNIX)
        path = self._file("tmp")
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(64)
        path.replace(self._admin)
        self._kept.append(listener)
        self._on_readable(listener.fileno(), lambda: self._answer(listener))

    def _answer(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with contextlib.ExitStack() as stack:
                stack.callback(connection.close)
                connection.settimeout(ANSWER_TIMEOUT_S)
                command = receive(connection, until=b"\n").strip()
                if command == ADOPT:
                    connection.sendall(b"%d\n" % self._pid)
                    self._kept.append(connection)
                    self._on_readable(connection.fileno(), self._end)
                    self._deadline = None
                    stack.pop_all()
                    return
                began = time.monotonic()
                answer = query(
                    self._file("sock"), command, max(POLL_S, min(HUNG_S, self._patience_s))
                )
                if not answer and self._unanswered_since is None:
                    self._unanswered_since = began
                if command == INFO and not answer:  # HAProxy is down: Serve may still replace it
                    answer = b"Pid: 0\n"
                connection.sendall(re.sub(rb"(?m)^Pid: \d+", b"Pid: %d" % self._known_pid, answer))

    def _watch_ancestors(self) -> None:
        """Watches raylet, manager and parent; exits if the raylet or the parent has exited."""
        try:
            raylet = open_raylet()
            parent = os.pidfd_open(self._known_pid)
        except ProcessLookupError:
            self._end()
            return
        if raylet is None:
            die_with_parent()
        else:
            self._on_readable(raylet, self._end)
        self._on_readable(parent, lambda: self._lose_parent(parent))
        if os.getppid() != self._known_pid:
            self._end()
        with contextlib.suppress(OSError):
            if self._manager is not None:
                self._manager_pidfd = os.pidfd_open(self._manager)
                self._on_readable(self._manager_pidfd, self._lose_manager)

    def _lose_manager(self) -> None:
        assert self._manager_pidfd is not None
        self._selector.unregister(self._manager_pidfd)
        os.close(self._manager_pidfd)
        self._manager_pidfd = None
        self._manager_ended_at = time.monotonic()
        if self._deadline is not None and self._deadline[1] == self._replace_manager:
            self._end()  # Serve has stopped both

    def _lose_parent(self, parent: int) -> None:
        self._selector.unregister(parent)
        os.close(parent)
        now = time.monotonic()
        is_stopped = self._is_stopping or now < self._manager_ended_at + STOP_S
        if self._is_new or is_stopped:
            self._end()
            return
        self._unlink(self._known_pid)
        self._known_pid = self._pid
        if self._manager_pidfd is not None:
            self._deadline = (now + STOP_S, self._replace_manager)

    def _replace_manager(self) -> None:
        assert self._manager_pidfd is not None
        _log(f"killing manager {self._manager}: it has lost its HAProxy and cannot reload it")
        self._deadline = (time.monotonic() + ADOPTION_S, self._end)
        signal.pidfd_send_signal(self._manager_pidfd, signal.SIGKILL)

    def _stop(self, number: int) -> None:
        self._is_stopping = True
        self._deadline = None
        if self._target is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._target, number)

    def _end(self) -> None:
        self._status = 0

    def _on_readable(self, descriptor: int, handle: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handle)

    def _forget_target(self) -> None:
        if self._target is not None:
            descriptor, self._target = self._target, None
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _write_configuration(self) -> None:
        replacement = rf"\g<1>{self._file('sock')}"
        self._file("cfg").write_text(ADMIN_SOCKET.sub(replacement, self._configuration, count=1))
        self._link()

    def _link(self) -> None:
        """Links the files under names with the parent's process id."""
        self._unlink(self._known_pid)
        for suffix in LINKED:
            self._file(suffix, self._known_pid).symlink_to(self._file(suffix).name)

    def _unlink(self, pid: int) -> None:
        for suffix in SUFFIXES:
            self._file(suffix, pid).unlink(missing_ok=True)

    def _file(self, suffix: str, pid: int = 0) -> Path:
        return self._admin.with_name(f"{pid or self._pid}.{suffix}")

    def _sweep(self) -> None:
        """Removes files of guards that were killed; one of them may have had this guard's process
        id."""
        for path in self._admin.parent.glob("[0-9]*.*"):
            is_guards = path.stem.isdigit() and path.suffix.removeprefix(".") in SUFFIXES
            is_own = path.stem in (str(self._pid), str(self._known_pid))
            if is_guards and (is_own or not is_running(int(path.stem))):
                path.unlink(missing_ok=True)

    def _clean_up(self) -> None:
        if self._child and self._target is not None:
            signal.pidfd_send_signal(self._target, signal.SIGKILL)
            os.waitpid(self._child, 0)  # its ports are free when this process has ended
        for pid in {self._pid, self._known_pid}:
            self._unlink(pid)


def handle_signals(stop: Callable[[int], None]) -> None:
    """Calls `stop` with the number of each signal that stops HAProxy. Ignores the signals that
    pause HAProxy, which a new HAProxy sends to the previous one if it cannot bind its sockets."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGTTOU, signal.SIGTTIN):
        signal.signal(number, lambda number, frame: None)
    for number in STOPPING:
        signal.signal(number, lambda number, frame: stop(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def is_running(pid: int) -> bool:
    """Whether a process is running; one that has ended may still be listed in /proc."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        return not has_ended(pidfd)
    finally:
        os.close(pidfd)


def has_ended(pidfd: int) -> bool:
    """Whether a process has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def raylet_id() -> int | None:
    """Process id of the node's raylet; None if it is unknown."""
    value = os.environ.get(RAYLET_VARIABLE, "")
    return int(value) if value.isdecimal() else None


def open_raylet() -> int | None:
    """pidfd of the node's raylet; None if it is unknown.

    Raises:
        ProcessLookupError: the raylet has ended.
    """
    raylet = raylet_id()
    try:
        return None if raylet is None else os.pidfd_open(raylet)
    except ProcessLookupError:
        raise
    except (OverflowError, OSError):
        return None


def split_arguments(arguments: list[str]) -> tuple[list[str], list[int]]:
    """HAProxy's arguments without `-x` and `-sf`, and the process ids after `-sf`."""
    options: list[str] = []
    old: list[int] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "-x":
            del rest[:1]
        elif word == "-sf":
            while rest and rest[0].isdigit():
                old.append(int(rest.pop(0)))
        else:
            options.append(word)
    return options, old


def has_routes(configuration: str) -> bool:
    """Whether a configuration routes requests to an application; a manager's initial one does
    not."""
    return re.search(r"(?m)^\s*use_backend ", configuration) is not None


def _spawn(command: list[str]) -> int:
    """Starts a program that the kernel kills when this process ends; returns its id."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent()
        if os.getppid() == parent:
            os.execv(command[0], command)
    finally:
        os._exit(127)


def _log(text: str) -> None:
    print(f"haproxy_guard: {text}", file=sys.stderr, flush=True)
