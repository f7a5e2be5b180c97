// Elements of the page. Every text becomes a text node, so nothing that a client of MQTT sent is ever HTML.

import { visible } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element with attributes, listeners (names that begin with "on") and children: nodes, or texts; null is left out.
 */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  const shown = children.flat(Infinity).filter((child) => child != null);
  element.append(...shown.map((child) => (typeof child === "string" ? visible(child) : child)));
  return element;
}

/** Sets the text of an element, and leaves it alone if it is the same, which keeps a selection. */
export function setText(element, text) {
  const shown = visible(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/** Makes these nodes the children of an element; one that stays where it is keeps focus. */
export function setChildren(element, nodes) {
  nodes.forEach((node, index) => {
    const present = element.childNodes[index];
    if (present !== node) element.insertBefore(node, present ?? null);
  });
  while (element.childNodes.length > nodes.length) element.lastChild.remove();
}
