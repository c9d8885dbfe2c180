// A rolling line plot as SVG.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 200;
const HEIGHT = 40;

/** A plot of recent values, with its name and the last value below. */
export class Plot {
  /**
   * @param name title of the plot.
   * @param format converts a value to text.
   * @param length number of values that fill the width.
   */
  constructor(name, format, length) {
    this.format = format;
    this.length = length;
    this.line = document.createElementNS(SVG, "polyline");
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "plot");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true"); // the value is shown below
    svg.append(this.line);
    this.value = document.createElement("span");
    const caption = document.createElement("div");
    caption.className = "caption";
    caption.append(name, this.value);
    this.root = document.createElement("div");
    this.root.append(svg, caption);
  }

  /** Plots values, oldest first; the last one is at the right. */
  show(values) {
    const top = Math.max(...values, 1e-9);
    const step = WIDTH / (this.length - 1);
    const left = WIDTH - step * (values.length - 1);
    const points = values.map(
      (value, index) => `${(left + index * step).toFixed(1)},${heightOf(value, top)}`,
    );
    this.line.setAttribute("points", points.join(" "));
    this.value.textContent = values.length > 0 ? this.format(values.at(-1)) : "";
  }
}

function heightOf(value, top) {
  return (HEIGHT - 1 - (value / top) * (HEIGHT - 2)).toFixed(1);
}
