// Searches by an image, or by an item; shows what was found. Nothing is loaded from elsewhere, and no text becomes markup.
"use strict";

const at = (id) => document.getElementById(id);
const state = { info: null, query: null, running: null, shown: null };

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

function card(result) {
  const item = element("li");
  const button = element("button");
  button.type = "button";
  button.dataset.id = result.id;
  const labels = (result.labels ?? []).join(", ");
  const name = result.name ?? `#${result.id}`;
  if (state.info.thumbnails) {
    const image = element("img");
    image.alt = "";
    image.loading = "lazy";
    button.append(image);
    picture(image, result.id, () => image.replaceWith(element("span", "none", `#${result.id}`)));
  }
  button.append(element("span", "", name));
  if (labels) button.append(element("span", "labels", labels));
  const id = result.name ? `#${result.id} · ` : "";
  button.append(element("span", "faint", `${id}${result.score.toFixed(3)}`));
  button.setAttribute("aria-label", `${name}${labels ? `, ${labels}` : ""}, score ${result.score.toFixed(3)}: search by it`);
  item.append(button);
  return item;
}

function show(found) {
  at("results").replaceChildren(...found.results.map(card));
  const n = found.results.length;
  const what = n === 0 ? "No item passes the filters" : `${n} result${n === 1 ? "" : "s"}`;
  at("status").textContent = `${what}, ${found.took_ms.toFixed(1)} ms, of ${found.ntotal.toLocaleString("en")} items`;
}

function filters() {
  const chosen = [...at("labels").querySelectorAll(":checked")].map((box) => box.value);
  const deny = at("deny").value.split(/[\s,]+/).filter(Boolean);
  const wrong = deny.find((id) => !/^-?\d{1,19}$/.test(id));
  if (wrong) throw new Error(`Without ids: ${wrong} is no whole number.`);
  return { allow_labels: chosen, deny_ids: deny };
}

function body() {
  const k = at("k").value;
  if (!/^\d{1,9}$/.test(k) || +k < 1 || +k > state.info.max_k) throw new Error(`Results: a number from 1 to ${state.info.max_k}.`);
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

async function search() {
  if (!state.query || !state.info) return;
  state.running?.abort();
  const running = (state.running = new AbortController());
  document.body.classList.add("busy");
  try {
    const response = await call("/search", { method: "POST", signal: running.signal, ...body() });
    show(read(await response.text()));
    fail("");
  } catch (error) {
    if (error.name !== "AbortError") {
      fail(error.message);
      at("status").textContent = "";
      at("results").replaceChildren();
    }
  } finally {
    if (state.running === running) document.body.classList.remove("busy");
  }
}

function asked(text) {
  const image = at("asked-image");
  at("asked").hidden = false;
  at("asked-text").textContent = text;
  const fresh = image.cloneNode();
  fresh.removeAttribute("src");
  fresh.hidden = false;
  image.replaceWith(fresh);
  if (state.shown) URL.revokeObjectURL(state.shown);
  state.shown = null;
  return fresh;
}

function byFile(file) {
  if (!file || !state.info) return;
  if (!state.info.image) return fail("The model takes features, not images: search by an item's id.");
  if (file.size > state.info.max_upload) return fail(`The image has more than ${state.info.max_upload.toLocaleString("en")} bytes.`);
  if (location.hash) history.pushState(null, "", location.pathname);
  at("id").value = "";
  state.query = { file };
  const image = asked(file.name || "pasted image");
  state.shown = URL.createObjectURL(file);
  image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth <= 64));
  image.addEventListener("error", () => (image.hidden = true));
  image.src = state.shown;
  search();
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
  search();
}

function fromHash() {
  const id = location.hash.slice(1);
  if (/^-?\d{1,19}$/.test(id) && state.info) begin(id);
}

function labels(names) {
  at("labels").hidden = names.length === 0;
  const legend = at("labels").querySelector("legend");
  at("labels").replaceChildren(legend, ...names.slice(0, 1000).map((name) => {
    const label = element("label");
    const box = element("input");
    box.type = "checkbox";
    box.value = name;
    label.append(box, document.createTextNode(name));
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
    at("k").max = info.max_k;
    at("k").value = Math.min(24, info.max_k);
    labels(info.labels);
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
  else if (state.query) search();
  else fail("Choose an image, or give an item's id.");
});
at("labels").addEventListener("change", search);
at("k").addEventListener("change", search);
at("deny").addEventListener("change", search);
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
