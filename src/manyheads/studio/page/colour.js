// Colours that every reader can tell apart: Okabe and Ito's for heads, and scales whose lightness
// alone tells the value, from the paper's colour to a deep or a bright end.

const ON_LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fd1", "#8c8c3e"];
const ON_DARK = ["#48a7ea", "#f58342", "#2fc796", "#e59cc6", "#f2b632", "#9ad6f7", "#b39dee", "#c3c26a"];

export const MOST_HEADS = ON_LIGHT.length;

const LIGHT = [[252, 251, 247], [237, 242, 208], [190, 222, 186], [119, 193, 190], [58, 147, 185], [37, 93, 158], [20, 44, 98]];
const DARK = [[22, 26, 35], [34, 45, 84], [40, 82, 124], [39, 120, 135], [62, 158, 128], [143, 196, 94], [250, 226, 85]];
const DIVERGING = {
  light: [[178, 70, 24], [226, 148, 92], [249, 221, 193], [250, 249, 246], [196, 218, 238], [98, 155, 206], [24, 84, 158]],
  dark: [[255, 158, 100], [196, 104, 58], [92, 58, 44], [26, 30, 39], [38, 62, 96], [66, 122, 184], [140, 196, 255]],
};

export function dark() {
  return document.documentElement.dataset.theme === "dark";
}

// The colour of the first, the second, … picked head.
export function headColour(place) {
  return (dark() ? ON_DARK : ON_LIGHT)[place % MOST_HEADS];
}

export function sequential(value) {
  return along(dark() ? DARK : LIGHT, value);
}

// From -1 to 1, with nothing in the middle.
export function diverging(value) {
  return along(dark() ? DIVERGING.dark : DIVERGING.light, (value + 1) / 2);
}

function along(stops, value) {
  const place = Math.min(1, Math.max(0, value)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(place));
  const part = place - low;
  return stops[low].map((one, channel) => Math.round(one + (stops[low + 1][channel] - one) * part));
}

export function css([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}

// Ink that can be read on a colour.
export function inkOn([red, green, blue]) {
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#1c2433" : "#f6f7fa";
}

// 256 colours at once, for pictures.
export function table(scale) {
  return Array.from({ length: 256 }, (_, place) => scale(place / 255));
}

export function alpha(hex, opacity) {
  const number = parseInt(hex.slice(1), 16);
  return `rgb(${number >> 16} ${(number >> 8) & 255} ${number & 255} / ${opacity})`;
}
