"use strict";
// The drawings stand without this; it answers the pointer and the keyboard. What it has found is written into
// attributes of the document, so that whoever tests the page can ask.
(() => {
  const facts = document.documentElement.dataset;
  facts.errors = "0";
  addEventListener("error", () => { facts.errors = String(Number(facts.errors) + 1); });

  function bytes(value) {
    const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let index = 0;
    for (; value >= 1024 && index < 5; ++index) value /= 1024;
    return value.toFixed(index === 0 ? 0 : 2) + " " + names[index];
  }

  function time(ns) {
    if (ns === 0) return "0 s";
    if (ns < 1e3) return ns.toFixed(0) + " ns";
    if (ns < 1e6) return (ns / 1e3).toFixed(2) + " µs";
    if (ns < 1e9) return (ns / 1e6).toFixed(2) + " ms";
    if (ns < 60e9) return (ns / 1e9).toFixed(2) + " s";
    const seconds = Math.floor(ns / 1e9);
    return Math.floor(seconds / 60) + " min " + (seconds % 60) + " s";
  }

  // The last index whose value is not above `wanted`; 0 when all are.
  function last(count, value, wanted) {
    let low = 0, high = count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (value(middle) <= wanted) low = middle + 1; else high = middle;
    }
    return Math.max(low - 1, 0);
  }

  const between = (value, low, high) => Math.min(Math.max(value, low), high);

  // Keys and pointer of one plot: `step` gives the index that a key leads to, `at` the one under a point.
  function steer(figure, count, show, step, at) {
    const plot = figure.querySelector(".plot");
    const readout = figure.querySelector(".readout");
    let index = Number(plot.getAttribute("aria-valuenow"));
    const move = (wanted) => {
      index = between(wanted, 0, count - 1);
      readout.textContent = show(index);
      plot.setAttribute("aria-valuenow", index);
      plot.setAttribute("aria-valuetext", readout.textContent);
    };
    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const ends = { Home: 0, End: count - 1 };
      const wanted = event.key in ends ? ends[event.key] : step(event.key, index);
      if (wanted === undefined) return;
      event.preventDefault();
      move(wanted);
    });
    plot.addEventListener("pointermove", (event) => {
      const box = plot.querySelector("svg").getBoundingClientRect();
      move(at((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height));
    });
    plot.setAttribute("aria-valuetext", readout.textContent);
    return () => move(index);
  }

  function timeline(figure) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const count = data.time.length;
    const end = Math.max(data.time[count - 1], 1);
    const drawings = figure.querySelectorAll("svg");
    const cursor = figure.querySelector(".cursor");
    const times = figure.querySelectorAll(".times span");
    const moment = (t) => (data.counts ? "event " + Math.round(t) : time(t));
    let from = 0, span = end;

    function view(center, width) {
      span = between(width, end / 500, end);
      from = between(center - span / 2, 0, end - span);
      drawings.forEach((drawing) => {
        const height = drawing.viewBox.baseVal.height;
        drawing.setAttribute("viewBox", `${(from / end) * 10000} 0 ${(span / end) * 10000} ${height}`);
      });
      times.forEach((label, i) => { label.textContent = moment(from + (span * i) / (times.length - 1)); });
    }

    function show(i) {
      const t = data.time[i];
      if (t < from || t > from + span) view(t, span);
      const x = (t / end) * 10000;
      cursor.setAttribute("d", `M${x} 0V1000`);
      const requested = data.requested[i], reserved = data.reserved[i];
      const events = { a: "after an allocation of ", f: "after a free of ", r: "out of memory at a request of " };
      const event = events[data.events[i]];
      return `At ${moment(t)}${event ? ", " + event + bytes(data.bytes[i]) : ""}: ${bytes(requested)} requested, ` +
        `${bytes(reserved)} reserved, ${bytes(Math.max(reserved - requested, 0))} of it unused.`;
    }

    function zoom(kind, index) {
      const factor = { in: 0.5, out: 2, all: Infinity }[kind];
      view(data.time[index], span * factor);
    }

    const keys = { "+": "in", "=": "in", "-": "out", "0": "all" };
    let current = data.peak;
    const refresh = steer(figure, count, (i) => show((current = i)), (key, i) => {
      if (key in keys) {
        zoom(keys[key], i);
        return i;
      }
      return { ArrowLeft: i - 1, ArrowRight: i + 1, PageUp: i - 20, PageDown: i + 20 }[key];
    }, (x) => last(count, (i) => data.time[i], from + x * span));
    figure.querySelectorAll("button").forEach((button) => {
      button.addEventListener("click", () => {
        zoom(button.dataset.zoom, current);
        refresh();
      });
    });
    return count;
  }

  function blocks(figure) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const pieces = data.pieces;
    const cursor = figure.querySelector(".cursor");
    const rows = figure.querySelector("svg").viewBox.baseVal.height / data.rowHeight;
    const under = (unit) => last(pieces.length, (i) => pieces[i][0], unit);

    function outline(begin, width) {
      let path = "";
      for (const end = begin + width; begin < end;) {
        const row = Math.floor(begin / data.rowWidth);
        const stop = Math.min(end, (row + 1) * data.rowWidth);
        path += `M${begin % data.rowWidth} ${row * data.rowHeight}h${stop - begin}v${data.barHeight}h${begin - stop}z`;
        begin = stop;
      }
      return path;
    }

    function show(i) {
      const [begin, width, address, size, count, free, stream, pending, order, server, holder] = pieces[i];
      cursor.setAttribute("d", outline(begin, width));
      if (count === 0) return `${bytes(size)} of addresses from ${address} on that no block has.`;
      if (count > 1) return `${count} blocks from ${address} on, ${bytes(size)} in all, ${bytes(free)} of it free.`;
      if (stream === undefined) return `${bytes(size)} free at ${address}.`;
      return `${bytes(size)} at ${address}, ${stream}` + (order ? `, allocation ${order}` : "") +
        (pending ? ", freed and waiting for its stream" : "") + (server ? `, ${data.servers[server]}` : "") +
        (holder === undefined ? "" : `, ${data.holders[holder]}`) + ".";
    }

    steer(figure, pieces.length, show, (key, i) => ({
      ArrowLeft: i - 1,
      ArrowRight: i + 1,
      ArrowUp: under(pieces[i][0] - data.rowWidth),
      ArrowDown: under(pieces[i][0] + data.rowWidth),
    })[key], (x, y) => under((Math.floor(between(y, 0, 0.9999) * rows) + between(x, 0, 0.9999)) * data.rowWidth));
    return pieces.reduce((sum, piece) => sum + piece[4], 0);
  }

  // What is drawn is asked of the drawing, not of the data.
  const isDrawn = (figure) => [...figure.querySelectorAll("svg:first-of-type path")].some((path) => {
    const box = path.getBBox();
    return box.width > 0 && box.height > 0;
  });
  const all = (kind, start) => [...document.querySelectorAll("figure." + kind)].reduce((sum, figure) => sum + start(figure), 0);
  facts.points = String(all("timeline", timeline));
  facts.blocks = String(all("blocks", blocks));
  facts.drawn = String([...document.querySelectorAll("figure")].filter(isDrawn).length);
})();
