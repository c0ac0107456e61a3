"""The web page in headless Chromium, driven through its DevTools pipe: no package beside Chromium is needed.

    python3 tests/python/page_test.py [--shots DIR]

A server on a tiny model with random weights answers: what is tested is the page. Skipped where there is no Chromium (Debian: chromium).
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from serve_client import Server, random_model  # noqa: E402

KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "Space": (32, " ")}


class Browser:
    """Chromium behind its DevTools pipe (messages end with a zero byte), one page."""

    def __init__(self, program, profile):
        to_read, self.to = os.pipe()
        self.of, to_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking",
                 f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self.process = subprocess.Popen(["bash", "-c", script, "bash", program, *flags], pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.rest, self.last, self.session = b"", 0, None
        self.complaints, self.addresses = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")

    def close(self):
        os.close(self.to)  # the browser ends with its pipe
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def message(self):
        while b"\0" not in self.rest:
            part = os.read(self.of, 1 << 16)
            if not part:
                sys.exit("the browser has gone")
            self.rest += part
        text, _, self.rest = self.rest.partition(b"\0")
        return json.loads(text)

    def call(self, method, **params):
        self.last += 1
        request = {"id": self.last, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.to, json.dumps(request).encode() + b"\0")
        while True:
            m = self.message()
            if m.get("id") == self.last:
                if "error" in m:
                    sys.exit(f"{method}: {m['error']}")
                return m["result"]
            if m.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(m["params"]["exceptionDetails"])
            elif m.get("method") == "Log.entryAdded" and m["params"]["entry"]["level"] == "error":
                self.complaints.append(m["params"]["entry"])
            elif m.get("method") == "Network.requestWillBeSent":
                self.addresses.append(m["params"]["request"]["url"])

    def js(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            sys.exit(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression, what, seconds=30):
        end = time.time() + seconds
        while time.time() < end:
            value = self.js(f"Promise.resolve({expression}).then(v => !!v)")
            if value:
                return value
            time.sleep(0.02)
        sys.exit(f"{what}: still not so after {seconds} s: {expression}\nThe page: {self.js('document.body.innerText')[-600:]!r}")

    def goto(self, address):
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'", "the page loads")

    def click(self, selector):
        x, y = self.js(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'nearest'}}); const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def key(self, name, modifiers=0):
        code, text = KEYS[name]
        key = " " if name == "Space" else name
        common = dict(key=key, code=name, windowsVirtualKeyCode=code, modifiers=modifiers)
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def shot(self, path):
        import base64
        pathlib.Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


def check(ok, what):
    if not ok:
        sys.exit(f"failed: {what}")


LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"
TEXT = f"({LAST}?.textContent || '')"
IDLE = "!document.getElementById('send').hidden"


def settings(b, **values):
    """Through the dialog, as a user does."""
    b.click("#open-settings")
    b.wait("document.getElementById('settings').open", "the settings open")
    for name, value in values.items():
        b.js(f"document.getElementById('settings-form').elements[{json.dumps(name)}].focus()")
        if b.js("document.activeElement.tagName") == "SELECT":
            b.js(f"document.activeElement.value = {json.dumps(value)}")
        else:
            b.js("document.activeElement.select()")
            b.type(str(value)) if value != "" else b.js("document.activeElement.value = ''")
    b.click("#settings button.primary")
    b.wait("!document.getElementById('settings').open", "the settings close")
    b.js("new Promise(done => setTimeout(done, 50))")  # the close event, which takes them over, comes a moment later


def say(b, text):
    b.js("document.getElementById('input').focus()")
    b.type(text)
    b.key("Enter")


def conversation(b, server, address):
    b.goto(address)
    b.wait("document.getElementById('model').textContent.length > 0", "the model's name is shown")
    check(b.js("document.activeElement.id") == "input", "the cursor is where one types")
    settings(b, max_tokens=40, seed=1, thinking="off")
    # Shift+Enter makes a line, Enter sends; the answer grows piece by piece.
    b.click("#input")
    b.type("In the beginning")
    b.key("Enter", modifiers=8)
    b.type("was <b>the word</b>")
    check(b.js("document.getElementById('input').value") == "In the beginning\nwas <b>the word</b>", "Shift+Enter makes a line")
    b.js(f"window.sizes = new Set(); new MutationObserver(() => sizes.add({TEXT}.length)).observe(document.getElementById('log'), {{childList: true, subtree: true, characterData: true}})")
    b.key("Enter")
    b.wait(f"document.querySelectorAll('.message').length === 2 && {IDLE}", "an answer comes")
    check(b.js("document.querySelector('.message.user').textContent") == "In the beginning\nwas <b>the word</b>", "the message stands as it was written, markup is text")
    check(b.js("sizes.size") > 5, "the answer comes in pieces")
    meta = b.js(f"{LAST}.querySelector('.meta').textContent")
    check("40 tokens" in meta and "cut at its limit" in meta, f"the line below the answer: {meta}")
    check("of context" in b.js("document.getElementById('status').textContent"), "the context used is shown")
    first = b.js(f"{LAST}.querySelector('.text').textContent")

    # Stop: by the button and by Escape; the server's sequence ends. The page itself stops at the answer's first pieces: a quick server would have
    # come to the end of its context before word of them had gone out of the browser and back.
    settings(b, max_tokens=3000)
    stop = {"button": "document.getElementById('stop').click()",
            "Escape": "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true, cancelable: true}))"}
    for how in ("button", "Escape"):
        for _ in range(20):  # random weights may end the answer before it is stopped
            messages = b.js("document.querySelectorAll('.message').length")
            b.js(f"window.stopper = new MutationObserver(() => {{ if (document.querySelectorAll('.message').length === {messages} + 2 && {TEXT}.length > 20) {{"
                 f" stopper.disconnect(); {stop[how]}; }} }}); stopper.observe(document.getElementById('log'), {{childList: true, subtree: true, characterData: true}})")
            say(b, "Go on")
            b.wait(f"{IDLE} && {LAST}.querySelector('.meta')", "the answer ends")
            b.js("stopper.disconnect()")
            if b.js(f"{LAST}.textContent.includes('stopped')"):
                break
        check(b.js(f"{LAST}.textContent.includes('stopped')"), f"{how} stops")
        b.wait("fetch('metrics').then(r => r.text()).then(t => /godwit_requests_running 0/.test(t))", f"{how} ends the sequence on the server")

    # Thoughts are folded, and open by the keyboard.
    for seed in range(5):  # random weights may leave the think channel at once
        settings(b, max_tokens=30, thinking="on", seed=seed)
        say(b, "Think")
        b.wait(f"{IDLE} && {LAST}.querySelector('.meta')", "an answer comes")
        if b.js(f"{LAST}.querySelector('details') !== null"):
            break
    check(b.js(f"{LAST}.querySelector('details') !== null"), "thoughts come")
    check(not b.js(f"{LAST}.querySelector('details').open"), "thoughts are folded")
    b.js(f"{LAST}.querySelector('summary').focus()")
    b.key("Enter")
    b.wait(f"{LAST}.querySelector('details').open", "Enter opens the thoughts")

    # Kept over a reload.
    count = b.js("document.querySelectorAll('.message').length")
    b.call("Page.reload")
    b.wait("document.readyState === 'complete' && document.getElementById('model').textContent", "the page loads again")
    check(b.js("document.querySelectorAll('.message').length") == count >= 8, f"the conversation is kept: {count}")
    check(b.js("document.querySelectorAll('.message.assistant')[0].querySelector('.text').textContent") == first, "the first answer is kept")
    check(b.js("settings.max_tokens") == "30" and b.js("settings.thinking") == "on", "the settings are kept")

    # What the server refuses is shown, and the chat goes on.
    settings(b, thinking="off", system="word " * 6000)
    check(b.js("document.querySelector('.message.system') !== null"), "the system message is shown")
    say(b, "Too long")
    b.wait(f"{IDLE} && {LAST}.querySelector('.error')", "the refusal is shown")
    check("context" in b.js(f"{LAST}.querySelector('.error').textContent"), "it says what is wrong")
    settings(b, system="", max_tokens=5)
    b.click("#clear")
    check(b.js("document.querySelectorAll('.message').length") == 0 and b.js("document.getElementById('empty') !== null"), "New chat begins anew")


def tool_calls(b):
    """Calls of tools, from a stream that is made up: a model with random weights calls none."""
    b.js("""(() => {
      const real = window.fetch;
      const delta = d => "data: " + JSON.stringify({choices: [{index: 0, delta: d, finish_reason: d.tool_calls[0].function.arguments.endsWith("}") ? "tool_calls" : null}]}) + "\\n\\n";
      const call = (index, more) => delta({tool_calls: [{index, ...more}]});
      const body = call(0, {id: "c", type: "function", function: {name: "add", arguments: ""}}) + call(0, {function: {arguments: '{"a": 1, '}}) +
                   call(0, {function: {arguments: '"b": 2}'}}) + "data: [DONE]\\n\\n";
      window.fetch = (u, o) => u.includes("chat") ? Promise.resolve(new Response(body)) : real(u, o);
      window.restore = () => { window.fetch = real; };
    })()""")
    say(b, "1 + 2?")
    b.wait(f"{IDLE} && {LAST}?.querySelector('.call')", "the call is shown")
    check(b.js(f"{LAST}.querySelector('.call').textContent") == 'add({"a": 1, "b": 2})', "the call's parts are put together")
    b.js("restore()")
    b.click("#clear")


def growing(b):
    """An answer that comes while somebody reads it, is dropped with the page, or breaks off."""
    fake = """(() => {
      const real = window.fetch;
      window.feed = null;
      window.fetch = (u, o) => u.includes("chat") ? Promise.resolve(new Response(new ReadableStream({ start(c) { window.feed = c; } }))) : real(u, o);
      window.restore = () => { window.fetch = real; };
      window.piece = (d, reason = null) => feed.enqueue(new TextEncoder().encode("data: " + JSON.stringify({choices: [{index: 0, delta: d, finish_reason: reason}]}) + "\\n\\n"));
    })()"""
    b.js(fake)
    say(b, "Well?")
    b.wait("window.feed", "the page asks")
    b.js("piece({reasoning_content: 'one '})")
    b.wait(f"{LAST}?.querySelector('summary')", "a thought comes")
    b.js(f"{LAST}.querySelector('summary').focus()")
    b.key("Enter")
    for n in range(5):
        b.js(f"piece({{reasoning_content: 'and {n} '}})")
    b.wait(f"{LAST}.querySelector('details').textContent.includes('and 4')", "more thoughts come")
    check(b.js("document.activeElement.tagName") == "SUMMARY", "the focus stays on the thoughts while they come")
    check(b.js(f"{LAST}.querySelector('details').open"), "opened thoughts stay open")
    b.js("piece({content: 'done'}, 'stop'); feed.close()")
    b.wait(IDLE, "the answer ends")
    check(b.js("document.activeElement.tagName") == "SUMMARY", "the end of an answer takes the focus from nobody")

    b.js("window.feed = null")
    say(b, "And then?")
    b.wait("window.feed", "the page asks again")
    b.js("piece({content: 'half'}); feed.close()")
    b.wait(f"{IDLE} && {LAST}.querySelector('.error')", "an answer without its end is an error")
    check("cut" in b.js(f"{LAST}.querySelector('.error').textContent"), "it says that the answer was cut")

    b.js("window.feed = null")
    say(b, "Do not lose this")
    b.wait("window.feed", "the page asks once more")
    b.js("piece({content: 'as far as it came'})")
    b.wait(f"{TEXT} === 'as far as it came'", "an answer begins")
    b.call("Page.reload")
    b.wait("document.readyState === 'complete' && document.getElementById('model').textContent", "the page loads again")
    check(b.js("[...document.querySelectorAll('.message.user')].at(-1).textContent") == "Do not lose this", "what was asked is kept over a reload in the middle of the answer")
    check("as far as it came" in b.js(f"{LAST}.textContent") and b.js(f"{LAST}.querySelector('.meta, .error') !== null"), "so is what had come of the answer, and that it was cut")
    settings(b, temperature="", max_tokens=5)
    check(b.js("settings.temperature") == 1, "an emptied field is as it was at first")
    b.click("#clear")


def pictures(b):
    """Dropped on the page, taken away again, sent, kept over a reload."""
    if not b.js("sees"):
        return check(b.js("document.getElementById('attach').hidden"), "a model that takes no pictures is not offered any")
    b.js("""(async () => {
      const make = async (name, type, colour) => {
        const c = new OffscreenCanvas(60, 40), g = c.getContext("2d");
        g.fillStyle = colour; g.fillRect(0, 0, 60, 40);
        return new File([await c.convertToBlob({ type })], name, { type });
      };
      window.drop = new DataTransfer();
      for (const f of [await make("a.png", "image/png", "red"), await make("b.jpg", "image/jpeg", "blue"), new File(["x"], "c.txt", { type: "text/plain" })]) drop.items.add(f);
      window.dispatchEvent(new DragEvent("dragover", { dataTransfer: drop, bubbles: true, cancelable: true }));
    })()""")
    check(b.js("document.body.classList.contains('dropping')"), "the page shows that it takes what is dropped")
    b.js("void window.dispatchEvent(new DragEvent('drop', { dataTransfer: drop, bubbles: true, cancelable: true }))")
    b.wait("document.querySelectorAll('#attached img').length === 2", "two of three files are pictures")
    b.click("#attached button")
    check(b.js("document.querySelectorAll('#attached img').length") == 1, "a picture can be taken away again")
    b.js("window.asked = null; window.real = window.fetch; window.fetch = (u, o) => { if (u.includes('chat')) asked = JSON.parse(o.body); return real(u, o); }")
    say(b, "What is this?")
    b.wait(f"{IDLE} && {LAST}?.querySelector('.meta')", "an answer comes")
    check(b.js("asked.messages.map(m => m.role).join()") == "user", "the answer to come is no part of the question")
    content = b.js("asked.messages.at(-1).content")
    check([part["type"] for part in content] == ["image_url", "text"] and content[0]["image_url"]["url"].startswith("data:image/jpeg;base64,"), "the picture is sent")
    b.call("Page.reload")
    b.wait("document.readyState === 'complete' && document.querySelector('.message.user img')?.naturalWidth === 60", "the picture is kept")
    b.wait("document.getElementById('model').textContent", "the page loads again")
    b.click("#clear")


CONTRAST = """(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = parse(c).map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const body = getComputedStyle(document.body), faint = getComputedStyle(document.getElementById("status")), send = getComputedStyle(document.getElementById("send"));
  const footer = getComputedStyle(document.querySelector("footer"));
  return [ratio(body.color, body.backgroundColor), ratio(faint.color, footer.backgroundColor), ratio(send.color, send.backgroundColor), light(body.backgroundColor)];
})()"""


def looks(b, shots):
    say(b, "A message with averylongwordwithoutanyblanks" + "x" * 300)
    b.wait(f"{IDLE} && {LAST}?.querySelector('.meta')", "an answer comes")
    backs = {}
    for scheme in ("light", "dark"):
        b.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for width, height in ((1200, 800), (360, 640)):
            b.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
            body, faint, send, backs[scheme] = b.js(CONTRAST)
            check(body >= 7 and faint >= 4.5 and send >= 4.5, f"contrast in {scheme}: {body:.1f} {faint:.1f} {send:.1f}")
            check(b.js("document.scrollingElement.scrollWidth") <= width, f"nothing is wider than {width} pixels")
            for element in ("#send", "#input", "#open-settings", "#clear"):
                box = b.js(f"(() => {{ const r = document.querySelector('{element}').getBoundingClientRect(); return [r.left, r.right, r.top, r.bottom]; }})()")
                check(box[0] >= 0 and box[1] <= width and box[2] >= 0 and box[3] <= height, f"{element} is in sight at {width} pixels: {box}")
            b.click("#open-settings")
            b.wait("document.getElementById('settings').open", "the settings open")
            box = b.js("(() => { const r = document.getElementById('settings').getBoundingClientRect(); return [r.left, r.right]; })()")
            check(box[0] >= 0 and box[1] <= width, f"the settings fit in {width} pixels: {box}")
            if shots:
                b.shot(f"{shots}/{scheme}-{width}-settings.png")
            b.key("Escape")
            b.wait("!document.getElementById('settings').open", "Escape closes the settings")
            if shots:
                b.shot(f"{shots}/{scheme}-{width}.png")
    check(backs["light"] > 0.5 > backs["dark"], "light and dark")
    b.call("Emulation.clearDeviceMetricsOverride")
    # By Tab alone one gets to everything, and sees where one is.
    b.js("document.activeElement.blur()")
    seen = set()
    for _ in range(12):
        b.key("Tab")
        seen.add(b.js("document.activeElement.id"))
        check(b.js("document.activeElement === document.body || getComputedStyle(document.activeElement).outlineStyle !== 'none'"), "the focus is seen")
    check({"open-settings", "clear", "input", "send"} <= seen, f"Tab reaches everything: {seen}")
    unnamed = b.js("[...document.querySelectorAll('button, textarea, input, select')].filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map(e => e.outerHTML)")
    check(not unnamed, f"every control has a name: {unnamed}")


def main():
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
        print("skipped: no Chromium here (Debian: apt-get install chromium)")
        return
    shots = sys.argv[2] if sys.argv[1:2] == ["--shots"] else None
    with tempfile.TemporaryDirectory() as scratch:
        model = random_model("tiny", scratch + "/model")
        with Server(model, "--name", "tiny") as server:
            address = f"http://127.0.0.1:{server.port}/"
            b = Browser(program, scratch + "/profile")
            try:
                conversation(b, server, address)
                tool_calls(b)
                growing(b)
                pictures(b)
                looks(b, shots)
                outside = [a for a in b.addresses if not a.startswith((address, "data:", "blob:", "about:"))]
                check(not outside, f"nothing is asked of others: {outside}")
                # The refusal of too long a prompt is logged by the browser itself.
                complaints = [c for c in b.complaints if "400" not in json.dumps(c)]
                check(not complaints, f"the browser complains: {complaints}")
            finally:
                b.close()
    print("the page: conversation, streaming, stop, answers that are read while they come or break off, thoughts, settings, reload, refusals, tool calls, pictures, light and dark, phone, keyboard")


if __name__ == "__main__":
    main()
