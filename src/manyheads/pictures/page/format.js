// How the report and the studio write numbers, as percent and number in Python do.

const UNKNOWN = "–";

function minus(text) {
  return text.replaceAll("-", "−");
}

// A fraction with at least two significant digits: 97%, 4.2%, 0.03%.
export function percent(fraction) {
  if (fraction === null || fraction === undefined) return UNKNOWN;
  const size = Math.abs(100 * fraction);
  const text = (100 * fraction).toFixed(size >= 9.95 || size === 0 ? 0 : size >= 0.995 ? 1 : 2);
  return minus(`${Number(text) === 0 ? text.replace("-", "") : text}%`);
}

// Three significant digits: 0.123, 45.7, 12,346.
export function decimal(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 99.95) return minus(Math.round(value).toLocaleString("en"));
  return minus(size >= 0.001 ? value.toPrecision(3) : value.toExponential(1));
}

// A value of a measure, by the unit that the table of measures gives it.
export function formatted(value, unit) {
  return unit === "percent" ? percent(value) : decimal(value);
}
