# ruff: noqa: PTH101, PTH102, PTH103, PTH106, PTH110, PTH112, PTH114, PTH115, PTH120, PTH123, PTH208, PTH211
"""The small process behind the local backend; run by `local.py`, imports only the standard library.

It is exec'd once from the (large) caller, gives up root for good, enters a user and mount namespace of its
own and builds the read-only system tree that every sandbox shares. For each sandbox it clones a child into
fresh user, mount, pid, ipc, uts and net namespaces; that child is process 1 of the sandbox and serves the
caller over one socket. The agent's shell runs one user namespace further down, as an unprivileged uid
without capabilities, and may create no namespaces itself. A verifier's tests are process 1 themselves. When
the caller dies, everything here dies. (No pathlib: the fewer pages this process has, the cheaper its clones.)
"""

import ctypes
import fcntl
import gc
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any

UID = 61000  # the host uid taken by a caller that is root; in the range systemd leaves unused
NEWNS, NEWUTS, NEWIPC = 0x20000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, BIND, REC, PRIVATE = 2, 4, 4096, 16384, 1 << 18
READ_ONLY = 1
DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
MOUNT_SETATTR = 442
CLONE, PIVOT_ROOT = {"x86_64": (56, 155), "aarch64": (220, 41)}.get(platform.machine(), (0, 0))
SYSTEM_LINKS = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
MASKED = ("usr/local", "usr/src")  # may hold the host's own programs and this project
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DIRECTORIES = "usr etc dev proc tmp run run/shm var var/tmp var/log root home home/agent opt srv mnt .old".split()
DEVICE_LINKS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}  # into /proc/self
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n127.0.0.1 sandbox\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}

libc = ctypes.CDLL(None, use_errno=True)
python = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock: a clone must not race for it
python.syscall.restype = ctypes.c_long


def check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    check(
        libc.mount(
            source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
        ),
        f"mount {target}",
    )


def pivot(root: str, old: str) -> None:
    """Make `root` the root directory and let go of the old tree, which `old` (under `root`) held."""
    check(libc.syscall(PIVOT_ROOT, root.encode(), f"{root}{old}".encode()), "pivot_root")
    os.chdir("/")
    check(libc.umount2(old.encode(), DETACH), "umount")


def read_only(path: str, recursive: bool) -> None:
    attributes = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)  # MOUNT_ATTR_RDONLY | NOSUID | NODEV
    check(
        libc.syscall(MOUNT_SETATTR, -100, path.encode(), 0x8000 if recursive else 0, attributes, len(attributes)),
        f"mount_setattr {path}",
    )


def write(path: str, text: str | bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.write(descriptor, text.encode() if isinstance(text, str) else text)
    os.close(descriptor)


def map_user(inside: int, user: int, group: int) -> None:
    """Map one uid and gid of this process's new user namespace."""
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{inside} {user} 1")
    write("/proc/self/gid_map", f"{inside} {group} 1")


def system_folders(root: str) -> list[str]:
    """Make below `root` what links /bin, /lib and the like are here, and folders for those that are none: these are
    named, to be mounted.
    """
    for name in SYSTEM_LINKS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}")
    return [name for name in SYSTEM_LINKS if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]


def build_template() -> None:
    """Enter a tree that holds the system directories read-only, a private /etc, five devices and /proc."""
    root = "/tmp"
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=8m,mode=755")
    for name in ("usr", "etc", "dev", "proc", "new"):
        os.mkdir(f"{root}/{name}", 0o755)
    for name in ("usr", *system_folders(root)):
        mount(f"/{name}", f"{root}/{name}", None, BIND | REC)
        read_only(f"{root}/{name}", True)
    for name in MASKED:
        if os.path.isdir(f"{root}/{name}"):
            mount("tmpfs", f"{root}/{name}", "tmpfs", READ_ONLY | NOSUID | NODEV, "size=4k,mode=755")
    for name in DEVICES:
        write(f"{root}/dev/{name}", "")
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, BIND)
    for name, target in DEVICE_LINKS.items():
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
    os.symlink("/run/shm", f"{root}/dev/shm")
    for name, text in ETC.items():
        write(f"{root}/etc/{name}", text)
    if os.path.exists("/etc/ld.so.cache"):
        with open("/etc/ld.so.cache", "rb") as cache:
            write(f"{root}/etc/ld.so.cache", cache.read())
    if os.path.isdir("/etc/alternatives"):
        os.mkdir(f"{root}/etc/alternatives", 0o755)
        for name in os.listdir("/etc/alternatives"):
            if os.path.islink(f"/etc/alternatives/{name}"):
                os.symlink(os.readlink(f"/etc/alternatives/{name}"), f"{root}/etc/alternatives/{name}")
    mount("/proc", f"{root}/proc", None, BIND | REC)  # the kernel allows a new /proc only where one is seen
    read_only(root, False)
    pivot(root, "/new")


def hide_arguments() -> None:
    """Blank this process's command line: process 1 of a sandbox must not show the host's paths."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    libc.prctl(15, b"init", 0, 0, 0)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    owner = os.pidfd_open(os.getppid())
    os.umask(0o022)
    try:
        if not CLONE:
            raise OSError(f"machine {platform.machine()} is not supported")
        write("/proc/self/oom_score_adj", "1000")  # the kernel must kill here before it kills the trainer
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        user, group = os.getuid(), os.getgid()
        check(libc.unshare(NEWUSER | NEWNS), "unshare")
        map_user(0, user, group)
        build_template()
        hide_arguments()
    except OSError as error:
        control.send(f"{error}".encode())
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the caller closes us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    gc.disable()
    control.send(b"ok")
    poll = select.poll()
    poll.register(control.fileno(), select.POLLIN)
    poll.register(owner, select.POLLIN)
    while True:
        if any(descriptor == owner for descriptor, _ in poll.poll()):
            return
        message, descriptors, _, _ = socket.recv_fds(control, 16, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        python.PyOS_BeforeFork()
        flags = NEWUSER | NEWNS | NEWPID | NEWIPC | NEWUTS | NEWNET | signal.SIGCHLD
        child = python.syscall(CLONE, ctypes.c_ulong(flags), None, None, None, None)
        if child == 0:
            python.PyOS_AfterFork_Child()
            control.close()
            os.close(owner)
            try:
                Init(socket.socket(fileno=descriptors[0])).serve()
            finally:
                os._exit(1)
        python.PyOS_AfterFork_Parent()
        os.close(descriptors[0])


class Init:
    """Process 1 of one sandbox: builds its tree, starts processes, dies with the caller's socket."""

    def __init__(self, caller: socket.socket):
        self.caller = caller
        self.shell = 0  # process id of the agent's shell
        self.waited = 0  # process id of the root process the caller waits for
        self.namespaces = 0
        self.settings: dict[str, Any] = {}
        self.pipes: tuple[int, int] = (-1, -1)
        self.woken = -1  # readable after a signal

    def serve(self) -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        message, blob = self.receive()
        try:
            self.build(message)
            self.place(message["files"], blob)
            command_in, output_out = os.pipe()
            output_in, command_out = os.pipe()
            self.pipes = (command_in, command_out)
            self.woken, wake = os.pipe()
            os.set_blocking(wake, False)
            signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
            signal.signal(signal.SIGCHLD, self.reap)
            reply = json.dumps({"ok": True}).encode()
            descriptors = [os.open("/", os.O_PATH | os.O_DIRECTORY), os.pidfd_open(os.getpid()), output_out, output_in]
            socket.send_fds(self.caller, [struct.pack(">I", len(reply)) + reply], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            if message["agent"]:
                self.start_shell("0")
            else:
                self.become(message["arguments"], self.pipes, agent=False)
        except OSError as error:
            self.send({"error": f"{error}"})
            return
        while True:
            message, blob = self.receive()
            try:
                if message["op"] == "files":
                    self.place(message["files"], blob)
                elif message["op"] == "run":
                    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
                    self.start(message["arguments"], (null, null), agent=False)
                    os.close(null)
                    continue
                elif message["op"] == "terminal":
                    self.wait()
                    (slave,) = socket.recv_fds(self.caller, 1, 1)[1]
                    self.allow_namespace()
                    self.start(message["arguments"], (slave, slave), agent=True, terminal=True)
                    os.close(slave)
                self.send({"ok": True})
            except OSError as error:
                self.send({"error": f"{error}"})

    def receive(self) -> tuple[dict[str, Any], bytes]:
        header, blob = struct.unpack(">II", self.read(8))
        return json.loads(self.read(header)), self.read(blob)

    def read(self, count: int) -> bytes:
        parts = []
        while count:
            self.wait()
            part = self.caller.recv(min(count, 1 << 20))
            if not part:
                os._exit(0)
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def wait(self) -> None:
        """Return when the caller has written. A child's end wakes this up too, and Python then runs `reap`: in a
        plain recv it would not, where the signal comes just before the system call.
        """
        room = select.poll()
        room.register(self.caller, select.POLLIN)
        if self.woken >= 0:
            room.register(self.woken, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in room.poll()]
            if self.woken in ready:
                os.read(self.woken, 4096)
            if self.caller.fileno() in ready:
                return

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self.caller.sendall(struct.pack(">I", len(body)) + body)

    def reap(self, *_: Any) -> None:
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if child == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
            if child == self.shell:
                self.start_shell(str(code))
            elif child == self.waited:
                self.send({"exit": code})

    def build(self, message: dict[str, Any]) -> None:
        """Enter the sandbox's own tree: one writable tmpfs, everything else from the template."""
        self.settings = message
        map_user(0, 0, 0)
        options = f"size={message['disk_mb']}m,nr_inodes=32768,mode=755"
        mount("tmpfs", "/new", "tmpfs", NOSUID | NODEV, options)
        for name in DIRECTORIES:
            os.mkdir(f"/new/{name}", 0o755)
        for name in ("tmp", "var/tmp", "run/shm"):
            os.chmod(f"/new/{name}", 0o1777)
        for name in ("usr", "etc", "dev", *system_folders("/new")):
            mount(f"/{name}", f"/new/{name}", None, BIND | REC)
        mount("proc", "/new/proc", "proc", NOSUID | NODEV | 8)
        pivot("/new", "/.old")
        os.rmdir("/.old")
        check(libc.sethostname(b"sandbox", 7), "sethostname")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
            fcntl.ioctl(loopback, 0x8914, struct.pack("16sH14x", b"lo", 0x49))  # SIOCSIFFLAGS: up, running
        write("/proc/sys/user/max_user_namespaces", "0")
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # /proc/1 is closed to the agent, which has the same host uid

    def place(self, files: list[list[Any]], blob: bytes) -> None:
        """Write the files, in order; each is [path, size or -1 for a directory, mode, modification time]."""
        offset = 0
        for path, size, mode, mtime in files:
            if size < 0:
                os.makedirs(path, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(path, flags, 0o600)
                with open(descriptor, "wb", buffering=0) as target:
                    view = memoryview(blob)[offset : offset + size]
                    while view:
                        view = view[target.write(view) :]
                offset += size
                os.utime(path, (mtime, mtime))
            os.chmod(path, mode)
        for path, size, _, mtime in files:
            if size < 0:  # after the files, whose making changes it
                os.utime(path, (mtime, mtime))

    def start_shell(self, last: str) -> None:
        """Start the agent's shell; `last` is how the one before it ended."""
        self.allow_namespace()
        self.start([*self.settings["arguments"], last], self.pipes, agent=True)

    def allow_namespace(self) -> None:
        """Let one more user namespace be made: the next shell's."""
        self.namespaces += 1
        write("/proc/sys/user/max_user_namespaces", str(self.namespaces))

    def start(self, arguments: list[str], pipes: tuple[int, int], agent: bool, terminal: bool = False) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # its end must not be seen before its number
        child = os.fork()
        if child:
            if not agent:
                self.waited = child
            elif not terminal:
                self.shell = child
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            return
        self.become(arguments, pipes, agent, terminal)

    def become(self, arguments: list[str], pipes: tuple[int, int], agent: bool, terminal: bool = False) -> None:
        """Replace this process by a program: the agent's shell without privileges, anything else as root."""
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            os.setsid()
            os.dup2(pipes[0], 0)
            os.dup2(pipes[1], 1)
            os.dup2(pipes[1], 2)
            if terminal:
                fcntl.ioctl(0, 0x540E, 0)  # TIOCSCTTY
                self.settings["environment"]["TERM"] = "xterm-256color"
            for name, value in self.settings["limits"].items():
                resource.setrlimit(getattr(resource, name), (value, value))
            if agent:
                libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self may not be written
                check(libc.unshare(NEWUSER), "unshare")
                map_user(1000, 0, 0)
            libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            os.chdir(self.settings["workdir"])
            os.execve(arguments[0], arguments, self.settings["environment"])
        except OSError as error:
            os.write(2, f"sandbox: {error}\n".encode())
        finally:
            os._exit(127)


if __name__ == "__main__":
    main()
