// Colors that every reader can tell apart, for the report and the studio: Okabe and Ito's for heads
// and kinds, and scales that show a value by lightness alone.

const HEADS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fd1", "#8c8c3e"],
  dark: ["#48a7ea", "#f58342", "#2fc796", "#e59cc6", "#f2b632", "#9ad6f7", "#b39dee", "#c3c26a"],
};
const KINDS = {
  light: ["#a6cee8", "#f4b88f", "#93d6bb", "#e7bcd4", "#f2d28a", "#c9bdf0", "#cfd08f", "#b9c9d6", "#f0a8a0", "#a8dadc"],
  dark: ["#1d5c86", "#98481b", "#136b50", "#843f68", "#80600f", "#55449a", "#5f5f22", "#3d5266", "#8c352d", "#22686b"],
};
const SEQUENTIAL = {
  light: [[252, 251, 247], [237, 242, 208], [190, 222, 186], [119, 193, 190], [58, 147, 185], [37, 93, 158], [20, 44, 98]],
  dark: [[22, 26, 35], [34, 45, 84], [40, 82, 124], [39, 120, 135], [62, 158, 128], [143, 196, 94], [250, 226, 85]],
};
const DIVERGING = {
  light: [[178, 70, 24], [226, 148, 92], [249, 221, 193], [250, 249, 246], [196, 218, 238], [98, 155, 206], [24, 84, 158]],
  dark: [[255, 158, 100], [196, 104, 58], [92, 58, 44], [26, 30, 39], [38, 62, 96], [66, 122, 184], [140, 196, 255]],
};

export const MOST_HEADS = HEADS.light.length;

export function dark() {
  return document.documentElement.dataset.theme === "dark";
}

function theme() {
  return dark() ? "dark" : "light";
}

// The color of the first, the second, … selected head, as hexadecimal text.
export function headColor(place) {
  return HEADS[theme()][place % MOST_HEADS];
}

export function kindColor(place) {
  const hex = KINDS[theme()][place % KINDS.light.length];
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

// From 0 to 1.
export function sequential(value) {
  return along(SEQUENTIAL[theme()], value);
}

// From -1 to 1, with 0 in the middle.
export function diverging(value) {
  return along(DIVERGING[theme()], (value + 1) / 2);
}

// An attention weight by its square root, so that small ones can be seen.
export function weightColor(weight) {
  return sequential(Math.sqrt(weight));
}

function along(stops, value) {
  const place = Math.min(1, Math.max(0, value)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(place));
  return stops[low].map((one, channel) => Math.round(one + (stops[low + 1][channel] - one) * (place - low)));
}

export function css([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}

// The text color that can be read on a background.
export function inkOn([red, green, blue]) {
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#1c2433" : "#f6f7fa";
}

// 256 colors at once, for images.
export function colorTable(scale) {
  return Array.from({ length: 256 }, (_, place) => scale(place / 255));
}

export function alpha(hex, opacity) {
  const number = parseInt(hex.slice(1), 16);
  return `rgb(${number >> 16} ${(number >> 8) & 255} ${number & 255} / ${opacity})`;
}
