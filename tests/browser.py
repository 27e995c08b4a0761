"""A headless Chromium, driven through its DevTools pipe: opens a page, tells what it asked for and complained of."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1280,1000",
    "--remote-debugging-pipe",
    # A page that asks another host fails at once, whether or not the machine has a network.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)


def find_chromium() -> str | None:
    """The path of a Chromium on this machine; the variable CHROMIUM names another."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *NAMES))), None)


@dataclass
class Page:
    """An open page: addresses it asked for, and every error it printed, threw or failed to load."""

    browser: Browser
    session: str
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def evaluate(self, script: str) -> object:
        """The value of a JavaScript expression; promises are awaited, exceptions raised."""
        answer = self.browser.call(
            "Runtime.evaluate", self.session, expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 20.0) -> object:
        """Wait for an expression to become true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"{script} stayed {value!r} for {seconds} s; errors so far: {self.errors}")
            time.sleep(0.1)
        return value

    def point(self, x: float, y: float, *, press: bool = False) -> None:
        """Move the pointer to a place in the window, in CSS pixels, and click there if ``press``."""
        kinds = ["mouseMoved", *(("mousePressed", "mouseReleased") if press else ())]
        for kind in kinds:
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.browser.call("Input.dispatchMouseEvent", self.session, type=kind, x=x, y=y, **button)

    def key(self, name: str) -> None:
        """Press and release a key, such as "ArrowRight", in the element that has the focus."""
        text = {"text": name} if len(name) == 1 else {}
        self.browser.call("Input.dispatchKeyEvent", self.session, type="keyDown", key=name, **text)
        self.browser.call("Input.dispatchKeyEvent", self.session, type="keyUp", key=name)

    def settle(self, quiet: float = 0.7) -> None:
        """Wait until the page is loaded and has been silent for a while."""
        self.until("document.readyState === 'complete'")
        while self.browser.listen(quiet):
            pass

    def take(self, method: str, event: dict) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Network.loadingFailed" and not event.get("canceled"):
            self.errors.append(f"failed to load: {event['errorText']}")
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(part.get("value", part.get("description"))) for part in event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.errors.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")


class Browser:
    """One Chromium process with a profile of its own; a context manager that ends the process it started."""

    def __init__(self, binary: str, profile: Path) -> None:
        self.pages: dict[str, Page] = {}
        self._count, self._unread = 0, b""
        # Chromium reads commands from descriptor 3 and writes to 4: keep ours clear of both while they are moved there.
        theirs_in, self._out = map(_high, os.pipe())
        self._in, theirs_out = map(_high, os.pipe())

        def place_pipes() -> None:
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        self._process = subprocess.Popen(
            [binary, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=place_pipes,  # noqa: PLW1509  two system calls, and no thread holds a lock they need
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)

    def open(self, address: str) -> Page:
        """Open an address in a fresh page and wait until it has settled."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable", session)
        self.call("Page.navigate", session, url=address)
        page.settle()
        return page

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict:
        """Send a DevTools command and return its result; events that come meanwhile go to their pages."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for answer in self.listen(1.0):
                if answer.get("id") == self._count:
                    if "error" in answer:
                        raise RuntimeError(f"{method}: {answer['error']}")
                    return answer["result"]
        raise TimeoutError(f"Chromium did not answer {method}")

    def listen(self, seconds: float) -> list[dict]:
        """Messages that arrive within some seconds; an empty list when there is silence."""
        if not select.select([self._in], [], [], seconds)[0]:
            return []
        chunk = os.read(self._in, 1 << 20)
        if not chunk:
            raise RuntimeError("Chromium ended")
        *whole, self._unread = (self._unread + chunk).split(b"\0")
        messages = [json.loads(text) for text in whole]
        for message in messages:
            if page := self.pages.get(message.get("sessionId", "")):
                page.take(message.get("method", ""), message.get("params", {}))
        # A long message in parts is not silence.
        return messages or [{}]


def _high(descriptor: int) -> int:
    """The same pipe end under a number of 10 or more."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
