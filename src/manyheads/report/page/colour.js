// Colours that every reader can tell apart: scales whose lightness alone tells the value, and Okabe
// and Ito's for kinds, which are always written as well.

const SCALES = {
  light: [[250, 249, 245], [233, 240, 205], [186, 220, 186], [116, 191, 189], [56, 145, 184], [36, 91, 157], [19, 42, 96]],
  dark: [[30, 35, 46], [36, 50, 92], [41, 86, 128], [39, 122, 136], [64, 160, 127], [146, 198, 92], [250, 226, 85]],
};
const TWO_SIDED = {
  light: [[176, 68, 22], [226, 148, 92], [249, 221, 193], [250, 249, 246], [196, 218, 238], [98, 155, 206], [24, 84, 158]],
  dark: [[255, 158, 100], [196, 104, 58], [92, 58, 44], [30, 35, 46], [38, 62, 96], [66, 122, 184], [140, 196, 255]],
};
const KINDS = {
  light: ["#a6cee8", "#f4b88f", "#93d6bb", "#e7bcd4", "#f2d28a", "#c9bdf0", "#cfd08f", "#b9c9d6", "#f0a8a0", "#a8dadc"],
  dark: ["#1d5c86", "#98481b", "#136b50", "#843f68", "#80600f", "#55449a", "#5f5f22", "#3d5266", "#8c352d", "#22686b"],
};

function theme() {
  return document.documentElement.dataset.theme;
}

function along(stops, share) {
  const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(place));
  return stops[low].map((one, channel) => Math.round(one + (stops[low + 1][channel] - one) * (place - low)));
}

function css([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}

function inkOn([red, green, blue]) {
  return 0.299 * red + 0.587 * green + 0.114 * blue > 135 ? "#1c2433" : "#f6f7fa";
}

// The colour of a weight: its root, so that small ones are seen.
function weightColour(weight) {
  return along(SCALES[theme()], Math.sqrt(weight));
}

function kindColour(place) {
  const hex = KINDS[theme()][place % KINDS.light.length];
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

// From values to colours: two-sided and by the root where some are below nothing.
function scaleOf(measure) {
  const known = measure.values.filter((value) => value !== null);
  const low = Math.min(...known), high = Math.max(...known);
  if (low < 0 && high > 0) {
    const most = Math.max(-low, high);
    return { low: -most, high: most, colour: (value) => along(TWO_SIDED[theme()], (Math.sign(value) * Math.sqrt(Math.abs(value) / most) + 1) / 2) };
  }
  const bottom = measure.share ? 0 : low, top = measure.share ? Math.max(high, 0.1) : high;
  return { low: bottom, high: top, colour: (value) => along(SCALES[theme()], top > bottom ? (value - bottom) / (top - bottom) : 0) };
}
