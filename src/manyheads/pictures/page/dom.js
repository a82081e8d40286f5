// Elements made by a call: h("button", { class: "round", on: { click } }, "text").

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    } else if (name === "vars") {
      // Set by script: the policy of the page forbids style attributes.
      for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    } else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Other children in place of what the element held. Who was at its third button by keyboard is there afterwards too.
export function renew(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  const place = focused ? [...element.querySelectorAll(focused.localName)].indexOf(focused) : -1;
  element.replaceChildren(...children);
  if (place >= 0) element.querySelectorAll(focused.localName)[place]?.focus({ preventScroll: true });
}

export function debounce(milliseconds, act) {
  let waiting = 0;
  const call = (...given) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => act(...given), milliseconds);
  };
  call.cancel = () => clearTimeout(waiting);
  return call;
}

// For screen readers; others can see it.
export const announce = debounce(350, (sentence) => {
  document.getElementById("live").textContent = sentence;
});

export function download(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
