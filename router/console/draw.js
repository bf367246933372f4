// What all pictures share: a canvas that fits its box, the style sheet's colours, scales, numbers.

const NAMES = ["bg", "panel", "raised", "line", "grid", "ink", "ink-2", "ink-3", "prefill",
  "prefill-ink", "decode", "decode-ink", "mixed", "mixed-ink", "kv", "queue", "good", "bad",
  "bad-ink", "warn-ink"];

/** Colours by name, as they are in the present theme. */
export const colour = {};

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) colour[name] = style.getPropertyValue(`--${name}`).trim();
  colour.font = getComputedStyle(document.body).fontFamily;
}

/** A canvas in CSS pixels; ``paint(context, width, height)`` draws it all. */
export class Surface {
  constructor(canvas, paint) {
    this.canvas = canvas;
    this.paint = paint;
    this.context = canvas.getContext("2d");
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  draw() {
    const { canvas, context } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width || !height) return;
    const ratio = devicePixelRatio || 1;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w) canvas.width = w;
    if (canvas.height !== h) canvas.height = h;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11px ${colour.font}`;
    context.textBaseline = "middle";
    context.lineJoin = "round";
    this.paint(context, width, height);
  }
}

/** A colour of the style sheet, which are all six digits, with a share of opacity. */
export function faded(name, share) {
  return colour[name] + Math.round(share * 255).toString(16).padStart(2, "0");
}

/** Where a value between ``low`` and ``high`` lies on a logarithmic axis from ``a`` to ``b``. */
export function logScale(low, high, a, b) {
  const [from, width] = [Math.log(low), Math.log(high) - Math.log(low)];
  return (value) => a + ((Math.log(Math.max(value, low / 10)) - from) / width) * (b - a);
}

/** 1, 2 and 5 times powers of ten in a range; only the powers when that were too many. */
export function logTicks(low, high, most = 6) {
  const found = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) {
    for (const m of [1, 2, 5]) {
      const value = m * 10 ** k;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  if (found.length <= most) return found;
  const powers = found.filter((v) => Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9);
  return powers.length > 1 ? powers : found.filter((_, i) => i % 2 === 0);
}

export function line(context, points, style, width = 1.5, dash = []) {
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.strokeStyle = style;
  context.lineWidth = width;
  context.setLineDash(dash);
  context.stroke();
  context.setLineDash([]);
}

export function dot(context, x, y, radius, fill, stroke) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  if (fill) {
    context.fillStyle = fill;
    context.fill();
  }
  if (stroke) {
    context.strokeStyle = stroke;
    context.lineWidth = 1.5;
    context.stroke();
  }
}

export function write(context, text, x, y, style, align = "left") {
  context.fillStyle = style;
  context.textAlign = align;
  context.fillText(text, x, y);
}

/** The text, or as much of its end as fits: ids differ there. */
export function fit(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let kept = text.slice(-40);
  while (kept && context.measureText(`…${kept}`).width > width) kept = kept.slice(1);
  return `…${kept}`;
}

// --- numbers --------------------------------------------------------------------------------

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.00995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return `${value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : Math.round(value)} s`;
}

/** 2 s, 100 ms: without digits that say nothing. */
export function shortSeconds(value) {
  return value >= 1 ? `${+value.toPrecision(3)} s` : `${+(value * 1000).toPrecision(3)} ms`;
}

export function amount(value, unit = "") {
  const steps = ["", "k", "M", "G", "T", "P"];
  let i = 0;
  let left = value;
  while (left >= 999.5 && i < steps.length - 1) {
    left /= 1000;
    i += 1;
  }
  const digits = left >= 99.5 || (i === 0 && Number.isInteger(left)) ? 0 : left >= 9.95 ? 1 : 2;
  const text = i === 0 && left >= 9.95 ? `${Math.round(left)}` : left.toFixed(digits);
  return unit || steps[i] ? `${text} ${steps[i]}${unit}`.trimEnd() : text;
}

export function percent(share) {
  const value = share * 100;
  return `${value >= 99.95 || value === 0 ? Math.round(value) : value < 10 || value > 99 ? value.toFixed(1) : Math.round(value)} %`;
}

// --- elements -------------------------------------------------------------------------------

/** An element with attributes and children; text is always text, never markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set text only where it differs, so that nothing is laid out again for nothing. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Shares of a whole as a bar: [[class, value], …]. */
export function fillBar(bar, parts, whole) {
  const wanted = parts.filter(([, value]) => value > 0);
  while (bar.children.length > wanted.length) bar.lastChild.remove();
  wanted.forEach(([name, value], i) => {
    const part = bar.children[i] || bar.appendChild(document.createElement("i"));
    if (part.className !== name) part.className = name;
    part.style.width = `${(100 * value) / whole}%`;
  });
}
