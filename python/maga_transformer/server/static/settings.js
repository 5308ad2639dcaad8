// The panel's form: kept between visits, but for the key, which this tab alone keeps.

const form = document.getElementById("settings");
const STORE = "maga.settings";
const KEY = "maga.key";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];

export function restore() {
  const kept = JSON.parse(localStorage.getItem(STORE) ?? "{}");
  for (const [name, value] of Object.entries(kept)) if (form.elements[name]) form.elements[name].value = value;
  form.elements.key.value = sessionStorage.getItem(KEY) ?? "";
  theme();
  form.addEventListener("input", keep);
  form.addEventListener("reset", () => setTimeout(keep));
  form.addEventListener("submit", (event) => event.preventDefault());
}

/** What the model's own defaults are, in the empty fields. */
export function defaults(model) {
  const known = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, ...model.sampling_defaults };
  for (const name of NUMBERS) form.elements[name].placeholder = known[name] ?? (name === "seed" ? "random" : "as many as fit");
}

/** The fields of a request that are set. */
export function sampling() {
  const asked = {};
  for (const name of NUMBERS) {
    const field = form.elements[name];
    if (field.value !== "" && field.validity.valid) asked[name] = field.valueAsNumber;
  }
  const stop = form.elements.stop.value.split("\n").filter(Boolean);
  if (stop.length) asked.stop = stop;
  return asked;
}

export const system = () => form.elements.system.value.trim();

export function headers() {
  const key = form.elements.key.value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function keep() {
  const { key, ...kept } = Object.fromEntries(new FormData(form));
  localStorage.setItem(STORE, JSON.stringify(kept));
  sessionStorage.setItem(KEY, key);
  theme();
}

function theme() {
  document.documentElement.dataset.theme = form.elements.theme.value;
}
