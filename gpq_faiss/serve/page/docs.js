// A plain list of /openapi.json.
"use strict";

function line(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  document.getElementById("list").append(made);
}

async function list() {
  const api = await (await fetch("/openapi.json")).json();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      line("dt", `${method.toUpperCase()} ${path}`);
      line("dd", operation.description ?? "");
      const content = operation.requestBody?.content ?? {};
      for (const [kind, { schema }] of Object.entries(content)) line("dd", `${kind}: ${Object.keys(schema.properties).join(", ")}`);
      const answers = Object.entries(operation.responses).map(([status, one]) => `${status} ${one.description}`);
      line("dd", answers.join(" "));
    }
  }
}
list();
