// Small drawings: sparkline, stacked bar, heat map. Each takes data and an element; colours come from the style sheet.

const SVG = "http://www.w3.org/2000/svg";

// A line through `values` (null: a gap), scaled to [0, most].
export function sparkline(svg, values, most) {
  const width = 120, height = 28, top = Math.max(most ?? 0, ...values.map((v) => v ?? 0), 1e-9);
  let line = "", area = "", open = false, lastX = 0;
  values.forEach((value, i) => {
    const x = values.length > 1 ? (i / (values.length - 1)) * width : width;
    if (value == null) {
      if (open) area += `L${lastX},${height}Z`;
      open = false;
      return;
    }
    const y = (height - 2 - (value / top) * (height - 4)).toFixed(1);
    line += `${open ? "L" : "M"}${x.toFixed(1)},${y}`;
    area += open ? `L${x.toFixed(1)},${y}` : `M${x.toFixed(1)},${height}L${x.toFixed(1)},${y}`;
    open = true;
    lastX = x.toFixed(1);
  });
  if (open) area += `L${lastX},${height}Z`;
  if (!svg.firstChild) {
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    for (const name of ["area", "line"]) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      svg.append(path);
    }
  }
  svg.children[0].setAttribute("d", area);
  svg.children[1].setAttribute("d", line);
}

// Parts [{name, share}] side by side; `mark`: a share of the whole to point at, or null.
export function stackedBar(element, parts, mark = null) {
  parts.forEach((part, i) => {
    const segment = element.children[i] || element.appendChild(document.createElement("i"));
    segment.className = `part ${part.name}`;
    segment.style.width = `${(100 * part.share).toFixed(3)}%`;
  });
  while (element.children.length > parts.length) element.lastElementChild.remove();
  if (mark != null) {
    const line = element.appendChild(document.createElement("i"));
    line.className = "mark";
    line.style.left = `${(100 * Math.min(1, mark)).toFixed(2)}%`;
  }
}

// The colour of each of 256 levels, through the style sheet's stops --heat-0 .. --heat-4. The middle stop is even use;
// above it the scale is logarithmic up to `top`, the most used expert as a multiple of even use.
function palette(element, top) {
  const style = getComputedStyle(element);
  const stops = [0, 1, 2, 3, 4].map((i) => style.getPropertyValue(`--heat-${i}`).trim().match(/[0-9a-f]{2}/gi).map((hex) => parseInt(hex, 16)));
  return Array.from({ length: 256 }, (_, level) => {
    const times = (level / 255) * top, high = top > 1 ? Math.log(Math.max(times, 1)) / Math.log(top) : 0;
    const at = times <= 1 ? 2 * times : 2 + 2 * high, low = Math.min(3, Math.floor(at)), part = at - low;
    return stops[low].map((channel, i) => Math.round(channel + (stops[low + 1][i] - channel) * part));
  });
}

export class HeatMap {
  // Layers from top to bottom, experts from left to right; one pixel a cell, enlarged by the style sheet.
  constructor(canvas) {
    this.canvas = canvas;
    this.data = null;
    this.at = null;
  }

  show(data) {
    this.data = data;
    this.levels = Uint8Array.from(atob(data.levels), (letter) => letter.charCodeAt(0));
    this.draw();
  }

  draw() {
    if (!this.data?.layers) return;
    const { layers, experts } = this.data, colours = palette(this.canvas, this.data.top_share * experts);
    if (this.canvas.width !== experts || this.canvas.height !== layers) {
      this.canvas.width = experts;
      this.canvas.height = layers;
    }
    this.canvas.style.height = `${Math.round(Math.min(260, Math.max(90, layers * 7)))}px`;
    const brush = this.canvas.getContext("2d"), image = brush.createImageData(experts, layers);
    this.levels.forEach((level, i) => {
      image.data.set(colours[level], 4 * i);
      image.data[4 * i + 3] = 255;
    });
    brush.putImageData(image, 0, 0);
  }

  // [layer, expert] under a pointer.
  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const place = (at, size, count) => Math.min(count - 1, Math.max(0, Math.floor((at / size) * count)));
    return [place(event.clientY - box.top, box.height, this.data.layers), place(event.clientX - box.left, box.width, this.data.experts)];
  }

  share(layer, expert) {
    return (this.levels[layer * this.data.experts + expert] / 255) * this.data.top_share;
  }
}
