// Shows items of every label; searches by an image, or by an item; shows what was found, and more on scrolling. Nothing is loaded from elsewhere, and no text becomes markup.
"use strict";

const at = (id) => document.getElementById(id);
const FEW = 24; // items shown at first
const MOST = 200;
// query: { id } or { file }, null while browsing; items: what is shown; wanted: how many were asked for.
const state = { info: null, query: null, file: null, running: null, url: null, items: [], wanted: 0 };

// Ids have 64 bits, JavaScript's numbers 53: they are kept as text.
const read = (text) => JSON.parse(text.replace(/"id":\s*(-?\d+)/g, '"id":"$1"'));

async function call(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The service does not answer.");
  }
  if (response.status === 401) {
    at("sign-in").hidden = false;
    at("token").focus();
  }
  if (!response.ok) {
    const text = await response.text();
    let why = `status ${response.status}`;
    try {
      why = JSON.parse(text).error;
    } catch { /* not of this service */ }
    throw new Error(why);
  }
  return response;
}

function fail(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
}

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

async function picture(image, id, instead) {
  const path = `/items/${id}/thumbnail`;
  image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth <= 64));
  image.addEventListener("error", instead);
  if (!sessionStorage.getItem("token")) {
    image.src = path;
    return;
  }
  try {
    const url = URL.createObjectURL(await (await call(path)).blob());
    image.addEventListener("load", () => URL.revokeObjectURL(url), { once: true });
    image.src = url;
  } catch {
    instead();
  }
}

// In steps of 0.1, downwards: only the best possible score is 100.
function perCent(score, best) {
  return Math.floor(1000 * Math.min(1, Math.max(0, score / best)) + 1e-3) / 10;
}

function card(found, best) {
  const item = element("li");
  const button = element("button");
  button.type = "button";
  button.dataset.id = found.id;
  const labels = (found.labels ?? []).join(", ");
  const name = found.name ?? `#${found.id}`;
  if (state.info.thumbnails) {
    const image = element("img");
    image.alt = "";
    image.loading = "lazy";
    button.append(image);
    picture(image, found.id, () => image.replaceWith(element("span", "none", `#${found.id}`)));
  }
  button.append(element("span", "", name));
  if (labels) button.append(element("span", "labels", labels));
  if (found.name) button.append(element("span", "faint", `#${found.id}`));
  let said = "";
  if (found.score !== undefined) {
    const score = `score ${found.score.toFixed(3)}`;
    said = `, ${score}`;
    button.title = score;
    if (best > 0) {
      const part = perCent(found.score, best);
      const meter = element("meter");
      meter.max = 100;
      meter.value = part;
      const shown = element("span", "faint score", `${part.toFixed(1)} %`);
      shown.prepend(meter);
      button.append(shown);
      button.title = `${score}, best possible ${best.toFixed(3)}`;
      said = `, ${part.toFixed(1)} % of the best possible score`;
    } else {
      button.append(element("span", "faint", score));
    }
  }
  button.setAttribute("aria-label", `${name}${labels ? `, ${labels}` : ""}${said}: search by it`);
  item.append(button);
  return item;
}

// Items that are there already stay, with their pictures and the focus.
function show(items, best, status) {
  const had = state.items;
  const same = had.length <= items.length && had.every((one, n) => one.id === items[n].id && one.score === items[n].score);
  const cards = (same ? items.slice(had.length) : items).map((one) => card(one, best));
  if (same) at("results").append(...cards);
  else at("results").replaceChildren(...cards);
  state.items = items;
  at("status").textContent = status;
  at("scale").hidden = !(best > 0 && items.length);
  at("more").hidden = items.length < state.wanted || state.wanted >= state.info.max_k;
  // An observer reports only changes: what is still in view after this is to be reported again.
  nearEnd.unobserve(at("more"));
  if (!at("more").hidden) nearEnd.observe(at("more"));
}

function filters() {
  const chosen = [...at("labels").querySelectorAll(":checked")].map((box) => box.value);
  const deny = at("deny").value.split(/[\s,]+/).filter(Boolean);
  const wrong = deny.find((id) => !/^-?\d{1,19}$/.test(id));
  if (wrong) throw new Error(`Without ids: ${wrong} is no whole number.`);
  return { allow_labels: chosen, deny_ids: deny };
}

function body() {
  const k = state.wanted;
  const { allow_labels, deny_ids } = filters();
  if (state.query.file) {
    const form = new FormData();
    form.append("k", k);
    for (const label of allow_labels) form.append("allow_labels", label);
    for (const id of deny_ids) form.append("deny_ids", id);
    form.append("image", state.query.file);
    return { body: form };
  }
  const parts = [`"id":${state.query.id}`, `"k":${k}`];
  if (allow_labels.length) parts.push(`"allow_labels":${JSON.stringify(allow_labels)}`);
  if (deny_ids.length) parts.push(`"deny_ids":[${deny_ids.join(",")}]`);
  return { body: `{${parts.join(",")}}`, headers: { "content-type": "application/json" } };
}

// At most so many items at first; as many more whenever the end comes into view.
function step() {
  const labels = state.info.labels.length;
  if (state.query || !labels) return FEW;
  return Math.min(MOST, labels * Math.ceil(FEW / labels)); // equally many of each label
}

async function results(signal) {
  if (state.query) {
    const found = read(await (await call("/search", { method: "POST", signal, ...body() })).text());
    const n = found.results.length;
    const what = n === 0 ? "No item passes the filters" : `${n} result${n === 1 ? "" : "s"}`;
    return [found.results, found.best, `${what}, ${found.took_ms.toFixed(1)} ms, of ${found.ntotal.toLocaleString("en")} items`];
  }
  const asked = new URLSearchParams({ k: state.wanted });
  for (const label of filters().allow_labels) asked.append("label", label);
  const found = read(await (await call(`/items?${asked}`, { signal })).text());
  const n = found.items.length;
  const what = n === 0 ? "No items" : `${n} of ${found.ntotal.toLocaleString("en")} items: choose one to search by it`;
  return [found.items, null, what];
}

async function load(more = false) {
  if (!state.info) return;
  state.running?.abort();
  const running = (state.running = new AbortController());
  const before = state.wanted;
  state.wanted = Math.min((more ? state.wanted : 0) + step(), state.info.max_k);
  document.body.classList.add("busy");
  try {
    const found = await results(running.signal);
    if (!more) state.items = [{}]; // nothing stays
    show(...found);
    fail("");
  } catch (error) {
    if (error.name !== "AbortError") {
      fail(error.message);
      if (more) {
        state.wanted = before; // what is there stays
      } else {
        state.items = [];
        at("status").textContent = "";
        at("results").replaceChildren();
        at("scale").hidden = at("more").hidden = true;
      }
    }
  } finally {
    if (state.running === running) {
      state.running = null;
      document.body.classList.remove("busy");
    }
  }
}

const nearEnd = new IntersectionObserver((entries) => {
  if (entries.some((one) => one.isIntersecting) && !state.running && !at("more").hidden) load(true);
}, { rootMargin: "300px" });

function asked(text, labels = "") {
  const image = at("asked-image");
  at("asked").hidden = false;
  at("asked-text").textContent = text;
  at("asked-labels").textContent = labels;
  const fresh = image.cloneNode();
  fresh.removeAttribute("src");
  fresh.alt = `Query: ${text}`;
  fresh.hidden = false;
  image.replaceWith(fresh);
  if (state.url) URL.revokeObjectURL(state.url);
  state.url = null;
  return fresh;
}

function byFile(file) {
  if (!file || !state.info) return;
  if (!state.info.image) return fail("The model takes features, not images: search by an item's id.");
  if (file.size > state.info.max_upload) return fail(`The image has more than ${state.info.max_upload.toLocaleString("en")} bytes.`);
  if (location.hash) history.pushState(null, "", location.pathname);
  byThe(file);
}

function byThe(file) {
  at("id").value = "";
  state.query = { file };
  state.file = file;
  const image = asked(file.name || "pasted image");
  state.url = URL.createObjectURL(file);
  image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth <= 64));
  image.addEventListener("error", () => (image.hidden = true));
  image.src = state.url;
  load();
}

function byId(id) {
  if (!/^-?\d{1,19}$/.test(id)) return fail("Item id: a whole number is needed.");
  if (location.hash === `#${id}`) begin(id);
  else location.hash = id; // so that Back leads to the query before
}

function begin(id) {
  at("id").value = id;
  at("file").value = "";
  state.query = { id };
  const image = asked(`item ${id}`);
  image.hidden = !state.info.thumbnails;
  if (state.info.thumbnails) {
    picture(image, id, () => (image.hidden = true));
  }
  // The item that was chosen goes away, and would take the focus with it.
  if (at("results").contains(document.activeElement)) at("asked").focus({ preventScroll: true });
  name(id, image);
  load();
}

// The query's name and labels, beside its picture. Why there are none, the search says.
async function name(id, image) {
  try {
    const found = read(await (await call(`/items/${id}`)).text());
    if (state.query?.id !== id) return;
    const labels = (found.labels ?? []).join(", ");
    at("asked-text").textContent = found.name ?? `item ${id}`;
    at("asked-labels").textContent = labels;
    image.alt = `Query: ${found.name ?? `item ${id}`}${labels ? `, ${labels}` : ""}`;
  } catch { /* not there */ }
}

function browse() {
  at("id").value = at("file").value = "";
  state.query = state.file = null;
  at("asked").hidden = true;
  load();
}

function fromHash() {
  const id = location.hash.slice(1);
  if (!state.info) return;
  if (/^-?\d{1,19}$/.test(id)) begin(id);
  else if (state.file) byThe(state.file); // Back to an image
  else browse();
}

function labels(names, counts) {
  at("labels").hidden = names.length === 0;
  const legend = at("labels").querySelector("legend");
  at("labels").replaceChildren(legend, ...names.slice(0, 1000).map((name, n) => {
    const label = element("label");
    const box = element("input");
    box.type = "checkbox";
    box.value = name;
    label.append(box, document.createTextNode(name));
    if (counts) {
      const count = element("span", "count", counts[n].toLocaleString("en"));
      label.append(" ", count);
      box.setAttribute("aria-label", `${name}, ${count.textContent} item${counts[n] === 1 ? "" : "s"}`);
    }
    return label;
  }));
}

async function start() {
  try {
    const info = await (await call("/info")).json();
    state.info = { ...info, image: info.input === "images" };
    at("sign-in").hidden = true;
    fail("");
    at("about").textContent = `${info.ntotal.toLocaleString("en")} items, ${info.bits} bits each`;
    at("drop").hidden = !state.info.image;
    labels(info.labels, info.label_counts);
    document.body.dataset.ready = "yes";
    fromHash();
  } catch (error) {
    fail(error.message);
  }
}

at("file").addEventListener("change", (event) => byFile(event.target.files[0]));
document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
  if (file) byFile(file);
});
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    at("drop").classList.toggle("over", name === "dragover");
    if (name === "drop") byFile(event.dataTransfer.files[0]);
  });
}
at("query").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = at("id").value.trim();
  if (id && id !== state.query?.id) byId(id);
  else if (state.query) load();
  else fail("Choose an image, or give an item's id.");
});
at("labels").addEventListener("change", () => load());
at("deny").addEventListener("change", () => load());
at("more").addEventListener("click", () => load(true));
at("clear").addEventListener("click", () => {
  if (location.hash) history.pushState(null, "", location.pathname);
  browse();
  at("results").focus({ preventScroll: true });
});
at("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", at("token").value);
  start();
});
at("results").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  byId(button.dataset.id);
  window.scrollTo({ top: 0 });
});
at("results").addEventListener("keydown", (event) => {
  const cards = [...at("results").querySelectorAll("button")];
  const here = cards.indexOf(document.activeElement);
  if (here < 0) return;
  const top = cards[0].getBoundingClientRect().top;
  const across = cards.findIndex((one) => one.getBoundingClientRect().top > top + 1);
  const row = across < 0 ? cards.length : across;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row }[event.key];
  if (!step || !cards[here + step]) return;
  event.preventDefault();
  cards[here + step].focus();
});
window.addEventListener("hashchange", fromHash);
start();
