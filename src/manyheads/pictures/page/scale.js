// From the values of a measure to colors.

import { diverging, sequential } from "./color.js";

// Diverging, by the square root, where some values are negative.
export function scaleOf(values, unit) {
  const present = values.filter((value) => value !== null);
  const low = Math.min(...present), high = Math.max(...present);
  if (low < 0 && high > 0) {
    const most = Math.max(-low, high);
    return { low: -most, high: most, color: (value) => diverging(Math.sign(value) * Math.sqrt(Math.abs(value) / most)) };
  }
  const fraction = unit === "percent";
  const bottom = fraction ? 0 : low, top = fraction ? Math.max(high, 0.1) : high;
  return { low: bottom, high: top, color: (value) => sequential(top > bottom ? (value - bottom) / (top - bottom) : 0) };
}
