// The panel's live view: the engine's counters once a second, as rates.
import { element } from "./markdown.js";

const SECONDS = 60;
const at = (id) => document.getElementById(id);
const rates = [];
let before = null;

/** Calls `told` with the model's facts when they come; `headers` gives those of every request. */
export function watch(headers, told) {
  const look = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch("page/engine", { headers: headers(), cache: "no-store" });
        if (answer.status === 401 || answer.status === 403) throw new Error("API key needed");
        if (!answer.ok) throw new Error(`server answers ${answer.status}`);
        const { model, engine } = await answer.json();
        show(engine, model);
        told(model);
        state(engine.state === "ok" ? "ready" : engine.state, engine.state === "ok");
      } catch (error) {
        before = null;
        state(error instanceof TypeError ? "no connection" : error.message, false);
      }
    }
    setTimeout(look, 1000);
  };
  look();
}

export function facts(model) {
  const rows = {
    name: model.name,
    family: model.family,
    device: model.device,
    context: `${number(model.context)} tokens`,
    weights: size(model.weight_bytes),
    "K/V cache": `${size(model.kv_bytes)} of ${model.kv_dtype}, ${number(model.kv_tokens)} tokens`,
    "fits at once": `${number(Math.min(model.max_num_seqs, Math.floor(model.kv_tokens / model.context)))} of full length`,
    version: model.version,
  };
  at("facts").replaceChildren(...Object.entries(rows).flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
}

function state(words, good) {
  const place = at("state");
  if (place.textContent !== words) place.textContent = words; // a status is read aloud when it changes
  place.className = `state ${good ? "ok" : "bad"}`;
}

function show(now, model) {
  const time = performance.now() / 1000;
  const grown = (name) => (before ? now[name] - before.engine[name] : 0);
  const seconds = before ? time - before.time : 1;
  const output = grown("output_tokens") / seconds;
  at("output-rate").textContent = number(output);
  at("prompt-rate").textContent = number(grown("prompt_tokens") / seconds);
  at("running").textContent = `${now.running} of ${number(model.max_num_seqs)}`;
  at("waiting").textContent = number(now.waiting);
  const busy = grown("busy_seconds");
  at("share").textContent = grown("steps") && busy > 0 && now.least_seconds > 0 ? percent(grown("least_seconds") / busy) : "idle";
  at("cached").textContent = percent(now.prompt_tokens ? now.cached_tokens / now.prompt_tokens : 0);
  at("pages-live").style.width = `${(100 * now.pages_live) / now.pages_total}%`;
  at("pages-cached").style.width = `${(100 * now.pages_cached) / now.pages_total}%`;
  at("pages-words").textContent =
    `${number(now.pages_live)} in use, ${number(now.pages_cached)} cached, ${number(now.pages_free)} free; ${model.page_tokens} tokens each`;
  rates.push(output);
  if (rates.length > SECONDS) rates.shift();
  draw();
  before = { engine: now, time };
}

function draw() {
  const most = Math.max(1, ...rates);
  const points = rates.map((rate, i) => `${(120 * (SECONDS - rates.length + i)) / (SECONDS - 1)} ${31 - (29 * rate) / most}`);
  const first = (120 * (SECONDS - rates.length)) / (SECONDS - 1);
  at("history-line").setAttribute("d", `M${points.join("L")}`);
  at("history-area").setAttribute("d", `M${first} 32L${points.join("L")}L120 32Z`);
}

const number = (value) => (value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
const percent = (share) => `${Math.round(100 * share)} %`;
const size = (bytes) => (bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`);
