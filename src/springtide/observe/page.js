"use strict";
// The pointer's figures on line charts: nearest x, value of every line. `data-chart` is written by charts.py.
(() => {
  const near = (xs, x) => {
    let best = 0;
    for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
    return best;
  };
  const clear = (figure) => figure.querySelectorAll(".tip, .cross").forEach((e) => e.remove());
  document.addEventListener("mousemove", (event) => {
    const svg = event.target.closest && event.target.closest("figure[data-chart] svg.plot");
    document.querySelectorAll("figure[data-chart]").forEach(clear);
    if (!svg) return;
    const figure = svg.closest("figure"), data = JSON.parse(figure.dataset.chart), box = svg.getBoundingClientRect();
    const width = svg.viewBox.baseVal.width, at = ((event.clientX - box.left) / box.width) * width;
    if (at < data.left || at > data.right || !data.lines.length) return;
    const wanted = data.x0 + ((at - data.left) / (data.right - data.left)) * (data.x1 - data.x0);
    const longest = data.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const step = longest.x[near(longest.x, wanted)];
    const x = data.left + ((step - data.x0) / (data.x1 - data.x0)) * (data.right - data.left);
    const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [k, v] of Object.entries({ x1: x, x2: x, y1: 8, y2: svg.viewBox.baseVal.height - 30, class: "cross" }))
      cross.setAttribute(k, v);
    svg.append(cross);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.append(`${data.name} ${step}`);
    for (const line of data.lines) {
      const value = line.y[near(line.x, step)];
      if (value === null || value === undefined) continue;
      const row = document.createElement("div"), dot = document.createElement("i");
      dot.style.background = line.color;
      row.append(dot, `${line.name}  ${value}${data.unit}`);
      tip.append(row);
    }
    figure.append(tip);
    const home = figure.getBoundingClientRect(), px = box.left - home.left + (x / width) * box.width;
    tip.style.left = `${px > home.width / 2 ? px - tip.offsetWidth - 12 : px + 12}px`;
    tip.style.top = `${box.top - home.top + 8}px`;
  });

  // Live pages: fetch the page again and replace what changed; what is folded open stays open.
  const every = Number(document.body.dataset.live || 0);
  if (!every) return;
  const refresh = async () => {
    try {
      if (document.hidden) return;
      const reply = await fetch(location.href, { cache: "no-store" });
      if (!reply.ok) return;
      const page = new DOMParser().parseFromString(await reply.text(), "text/html");
      const fresh = page.querySelector("main"), shown = document.querySelector("main");
      const open = new Map([...shown.querySelectorAll("details[id]")].map((d) => [d.id, d.open]));
      fresh.querySelectorAll("details[id]").forEach((d) => open.has(d.id) && (d.open = open.get(d.id)));
      shown.replaceWith(fresh);
      document.title = page.title;
    } catch (error) {
      document.title = document.title.replace(/^(\(not reached\) )?/, "(not reached) ");
    } finally {
      setTimeout(refresh, every * 1000);
    }
  };
  setTimeout(refresh, every * 1000);
})();
