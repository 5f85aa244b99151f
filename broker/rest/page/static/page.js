// Keeps the shown view current: the server sends the part that changes, and it replaces the element of its id.
// Without this module the page shows the same, as of its loading.

const root = document.documentElement;
const state = document.getElementById("state");
const pause = document.getElementById("pause");
const scheme = document.getElementById("scheme");
let source = null;
let paused = false;

function place(focused) {
  // Where the focus is, so that a replaced part keeps it: links by their target, others by their place.
  const part = focused && focused.closest("#live");
  if (!part) return null;
  const href = focused.getAttribute("href");
  const all = [...part.querySelectorAll("a, button, input, [tabindex]")];
  return { href, index: all.indexOf(focused) };
}

function replace(id, html) {
  const part = document.getElementById(id);
  if (!part || part.contains(document.getSelection().anchorNode) && !document.getSelection().isCollapsed) return;
  const was = place(document.activeElement);
  const scrolled = [...part.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  const opened = [...part.querySelectorAll("details")].map((each) => each.open);
  part.replaceChildren(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
  part.querySelectorAll(".scroll").forEach((each, index) => { each.scrollLeft = scrolled[index] || 0; });
  part.querySelectorAll("details").forEach((each, index) => { each.open = opened[index] || false; });
  if (!was) return;
  const all = [...part.querySelectorAll("a, button, input, [tabindex]")];
  const same = was.href !== null && all.find((each) => each.getAttribute("href") === was.href);
  (same || all[was.index])?.focus({ preventScroll: true });
}

function close() {
  source?.close();
  source = null;
}

function open() {
  if (source || paused || document.hidden || !document.body.dataset.live) return;
  const address = new URL(location.href);
  address.searchParams.set("live", "1");
  address.hash = "";
  source = new EventSource(address);
  source.onmessage = (event) => {
    const { id, html } = JSON.parse(event.data);
    replace(id, html);
    if (state.textContent) state.textContent = "";
  };
  source.onerror = () => { state.textContent = "Not live: the server does not answer."; };
}

document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
addEventListener("pagehide", close);
addEventListener("pageshow", open);

if (document.body.dataset.live) {
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    if (paused) close(); else open();
  });
}

function readScheme() {
  try { return localStorage.getItem("scheme"); } catch { return null; }
}
if (readScheme()) root.dataset.scheme = readScheme();
scheme.hidden = false;
scheme.addEventListener("click", () => {
  const dark = (root.dataset.scheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.scheme = dark ? "light" : "dark";
  try { localStorage.setItem("scheme", root.dataset.scheme); } catch { /* the choice is of this page alone */ }
});
