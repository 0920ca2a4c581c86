// Formats numbers for display. An unknown value is a dash.

const DASH = "–";
const SPACE = "\u00a0"; // No line break between a number and its unit.

function known(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

function minus(text) {
  return text.replaceAll("-", "\u2212");
}

// Three significant digits, whole numbers grouped.
export function number(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-4) return minus(value.toExponential(1));
  if (Number.isInteger(value) || size >= 1000) return minus(Math.round(value).toLocaleString("en"));
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.01 ? 3 : 5;
  return minus(value.toFixed(digits));
}

export function share(value) {
  if (!known(value)) return DASH;
  const percent = value * 100;
  if (percent > 0 && percent < 0.005) return `<0.01${SPACE}%`;
  const digits = percent === 0 || percent === 100 ? 0 : Math.abs(percent) < 0.095 ? 2 : 1;
  return minus(percent.toFixed(digits)) + SPACE + "%";
}

export function signed(value, format = number) {
  return known(value) && value > 0 ? "+" + format(value) : format(value);
}

export function seconds(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.001) return number(value * 1e6) + SPACE + "µs";
  if (size < 0.1) return number(value * 1e3) + SPACE + "ms";
  if (size < 60) return minus(value.toFixed(size < 10 ? 2 : 1)) + SPACE + "s";
  const whole = Math.round(value), minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${whole % 60} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// A growing duration, in whole seconds.
export function since(value) {
  const whole = Math.max(0, Math.floor(value));
  return whole < 60 ? `${whole}${SPACE}s` : seconds(whole);
}

export function date(epoch) {
  if (!known(epoch)) return DASH;
  return new Date(epoch * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" });
}

export function plural(count, one, many = one + "s") {
  return `${number(count)} ${count === 1 ? one : many}`;
}

// Format by a metric's unit.
export function formatOf(unit) {
  return unit === "s" ? seconds : unit === "share" ? share : number;
}

// Axis labels with the same number of digits, as few as the ticks need.
export function tickTexts(ticks, format) {
  const scale = format === share ? 100 : 1, unit = format === share ? SPACE + "%" : format === seconds ? SPACE + "s" : "";
  const top = Math.max(...ticks.map(Math.abs)) * scale, step = Math.abs((ticks[1] ?? ticks[0]) - ticks[0]) * scale;
  if (ticks.length < 2 || ![number, share, seconds].includes(format) || step < 1e-4 || (format === seconds ? top >= 60 || step < 0.01 : top >= 10000)) return ticks.map(format);
  let digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1;
  return ticks.map((tick) => minus((tick * scale).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })) + unit);
}

export function mean(values) {
  const kept = values.filter(known);
  return kept.length ? kept.reduce((sum, one) => sum + one, 0) / kept.length : null;
}

// Mean of rates, weighted by duration or amount; entries with an unknown value or weight are left out.
export function weighted(values, weights) {
  const places = [...(values ?? []).keys()].filter((place) => known(values[place]) && weights?.[place] > 0);
  const whole = places.reduce((sum, place) => sum + weights[place], 0);
  return whole ? places.reduce((sum, place) => sum + values[place] * weights[place], 0) / whole : null;
}

export function last(values) {
  return values?.findLast(known) ?? null;
}

export function first(values) {
  return values?.find(known) ?? null;
}
