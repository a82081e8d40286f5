// How the report and the studio write numbers, as percent and number in Python do; in the language of the page.

const UNKNOWN = "–";

function minus(text) {
  return text.replaceAll("-", "−");
}

function isRussian() {
  return document.documentElement.lang === "ru";
}

// A value with so many digits after the point.
export function fixed(value, digits) {
  const text = minus(value.toFixed(digits));
  return isRussian() ? text.replace(".", ",") : text;
}

// A whole number: 12,346.
export function counted(value) {
  return minus(value.toLocaleString(isRussian() ? "ru" : "en"));
}

// A fraction with at least two significant digits: 97%, 4.2%, 0.03%.
export function percent(fraction) {
  if (fraction === null || fraction === undefined) return UNKNOWN;
  const size = Math.abs(100 * fraction);
  const text = fixed(100 * fraction, size >= 9.95 || size === 0 ? 0 : size >= 0.995 ? 1 : 2);
  return `${/[1-9]/.test(text) ? text : text.replace("−", "")}${isRussian() ? "\u00a0" : ""}%`;
}

// Three significant digits: 0.123, 45.7, 12,346.
export function decimal(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 99.95) return counted(Math.round(value));
  const text = minus(size >= 0.001 ? value.toPrecision(3) : value.toExponential(1));
  return isRussian() ? text.replace(".", ",") : text;
}

// A value of a measure, by the unit that the table of measures gives it.
export function formatted(value, unit) {
  return unit === "percent" ? percent(value) : decimal(value);
}
