// Shows items of every label; searches by an image, or by an item; shows what was found, and more on scrolling. Nothing is loaded from elsewhere, and no text becomes markup.
"use strict";

const at = (id) => document.getElementById(id);
const FEW = 24; // items shown at first, and as many more whenever the end comes into view
// query: { id } or { file }, null while browsing; items: what is shown; wanted: how many were asked for.
const state = { info: null, query: null, file: null, running: null, url: null, items: [], wanted: 0 };

// Ids have 64 bits, JavaScript's numbers 53: they are kept as text.
const read = (text) => JSON.parse(text.replace(/"id":\s*(-?\d+)/g, '"id":"$1"'));
const number = (n) => n.toLocaleString("en");

async function call(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The service does not answer.");
  });
  if (response.status === 401) {
    at("sign-in").hidden = false;
    at("token").focus();
  }
  if (!response.ok) {
    const said = await response.json().catch(() => ({})); // not of this service
    throw new Error(said.error ?? `status ${response.status}`);
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

async function picture(image, source, instead) {
  image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth <= 64));
  image.addEventListener("error", instead);
  try {
    // An image cannot send the token.
    const fetched = sessionStorage.getItem("token") && !source.startsWith("blob:");
    image.src = fetched ? URL.createObjectURL(await (await call(source)).blob()) : source;
    if (fetched) image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
  } catch {
    instead();
  }
}

const thumbnail = (id) => `/items/${id}/thumbnail`;

function card(found, best) {
  const item = element("li");
  const button = element("button");
  button.type = "button";
  button.dataset.id = found.id;
  if (state.info.thumbnails) {
    const image = element("img");
    image.alt = "";
    image.loading = "lazy";
    button.append(image);
    picture(image, thumbnail(found.id), () => image.replaceWith(element("span", "none", `#${found.id}`)));
  }
  const labels = (found.labels ?? []).join(", ");
  const said = [found.name ?? `#${found.id}`];
  button.append(element("span", "", said[0]));
  if (labels) {
    button.append(element("span", "labels", labels));
    said.push(labels);
  }
  if (found.name) button.append(element("span", "faint", `#${found.id}`));
  if (found.score !== undefined) {
    button.title = `score ${found.score.toFixed(3)}, best possible ${best.toFixed(3)}`;
    // In steps of 0.1, downwards: only the best possible score is 100.
    const part = best > 0 ? Math.floor(1000 * Math.min(1, Math.max(0, found.score / best)) + 1e-3) / 10 : 0;
    const shown = element("span", "faint score", `${part.toFixed(1)} %`);
    const meter = element("meter");
    meter.max = 100;
    meter.value = part;
    shown.prepend(meter);
    button.append(shown);
    said.push(`${part.toFixed(1)} % of the best possible score`);
  }
  button.setAttribute("aria-label", `${said.join(", ")}: search by it`);
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
  at("scale").hidden = best === null || !items.length;
  at("more").hidden = items.length < state.wanted || state.wanted >= state.info.max_k;
  // An observer reports only changes: what is still in view after this is to be reported again.
  nearEnd.unobserve(at("more"));
  if (!at("more").hidden) nearEnd.observe(at("more"));
}

function body(allow) {
  const deny = at("deny").value.split(/[\s,]+/).filter(Boolean);
  if (!deny.every((id) => /^-?\d{1,19}$/.test(id))) throw new Error("Without ids: whole numbers are needed.");
  if (state.query.file) {
    const form = new FormData();
    form.append("k", state.wanted);
    for (const label of allow) form.append("allow_labels", label);
    for (const id of deny) form.append("deny_ids", id);
    form.append("image", state.query.file);
    return { body: form };
  }
  const parts = [`"id":${state.query.id}`, `"k":${state.wanted}`, `"deny_ids":[${deny.join(",")}]`];
  if (allow.length) parts.push(`"allow_labels":${JSON.stringify(allow)}`);
  return { body: `{${parts.join(",")}}`, headers: { "content-type": "application/json" } };
}

async function results(signal) {
  const allow = [...at("labels").querySelectorAll(":checked")].map((box) => box.value);
  if (state.query) {
    const found = read(await (await call("/search", { method: "POST", signal, ...body(allow) })).text());
    const what = `${found.results.length} results, ${found.took_ms.toFixed(1)} ms, of ${number(found.ntotal)} items`;
    return [found.results, found.best, what];
  }
  const asked = new URLSearchParams([["k", state.wanted], ...allow.map((label) => ["label", label])]);
  const found = read(await (await call(`/items?${asked}`, { signal })).text());
  return [found.items, null, `${found.items.length} of ${number(found.ntotal)} items: choose one to search by it`];
}

async function load(more = false) {
  if (!state.info) return;
  state.running?.abort();
  const running = (state.running = new AbortController());
  const before = state.wanted;
  state.wanted = Math.min((more ? state.wanted : 0) + FEW, state.info.max_k);
  document.body.classList.add("busy");
  try {
    const found = await results(running.signal);
    if (!more) state.items = [{}]; // nothing stays
    show(...found);
    fail("");
  } catch (error) {
    if (error.name !== "AbortError") {
      if (more) state.wanted = before; // what is there stays
      else {
        state.wanted = state.info.max_k; // no more
        show([], null, "");
      }
      fail(error.message);
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

// The query beside the fields: a picture, and a text.
function asked(text, source) {
  at("asked").hidden = false;
  at("asked-text").textContent = text;
  at("asked-labels").textContent = "";
  const image = at("asked-image");
  const fresh = image.cloneNode();
  fresh.removeAttribute("src");
  fresh.alt = `Query: ${text}`;
  fresh.hidden = !source;
  image.replaceWith(fresh);
  if (source) picture(fresh, source, () => (fresh.hidden = true));
  if (state.url) URL.revokeObjectURL(state.url);
  state.url = null;
}

function byFile(file) {
  if (!file || !state.info) return;
  if (state.info.input !== "images") return fail("The model takes features, not images: search by an item's id.");
  if (file.size > state.info.max_upload) return fail(`The image has more than ${number(state.info.max_upload)} bytes.`);
  if (location.hash) history.pushState(null, "", location.pathname);
  at("id").value = "";
  state.query = { file };
  state.file = file;
  const url = URL.createObjectURL(file);
  asked(file.name || "pasted image", url);
  state.url = url;
  load();
}

function byId(id) {
  if (!/^-?\d{1,19}$/.test(id)) return fail("Item id: a whole number is needed.");
  if (location.hash === `#${id}`) begin(id);
  else location.hash = id; // so that Back leads to the query before
}

async function begin(id) {
  at("id").value = id;
  at("file").value = "";
  state.query = { id };
  asked(`item ${id}`, state.info.thumbnails ? thumbnail(id) : null);
  // The item that was chosen goes away, and would take the focus with it.
  if (at("results").contains(document.activeElement)) at("asked").focus({ preventScroll: true });
  load();
  try { // why there are no name and labels, the search says
    const found = read(await (await call(`/items/${id}`)).text());
    if (state.query?.id !== id) return;
    at("asked-text").textContent = found.name ?? `item ${id}`;
    at("asked-labels").textContent = (found.labels ?? []).join(", ");
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
  else if (state.file) byFile(state.file); // Back to an image
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
    label.append(box, document.createTextNode(name), element("span", "count", number(counts[n])));
    return label;
  }));
}

async function start() {
  try {
    const info = (state.info = await (await call("/info")).json());
    at("sign-in").hidden = true;
    fail("");
    at("about").textContent = `${number(info.ntotal)} items, ${info.bits} bits each`;
    at("drop").hidden = info.input !== "images";
    labels(info.labels, info.label_counts);
    document.body.dataset.ready = "yes";
    fromHash();
  } catch (error) {
    fail(error.message);
  }
}

at("file").addEventListener("change", (event) => byFile(event.target.files[0]));
document.addEventListener("paste", (event) => byFile([...event.clipboardData.files].find((one) => one.type.startsWith("image/"))));
for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => event.preventDefault());
document.addEventListener("drop", (event) => byFile(event.dataTransfer.files[0]));
at("query").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = at("id").value.trim();
  if (id && id !== state.query?.id) byId(id);
  else if (state.query) load();
  else fail("Choose an image, or give an item's id.");
});
for (const name of ["labels", "deny"]) at(name).addEventListener("change", () => load());
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
window.addEventListener("hashchange", fromHash);
start();
