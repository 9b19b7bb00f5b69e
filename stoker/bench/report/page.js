"use strict";
(() => {
  const tip = document.getElementById("tip");
  const place = (event, words) => {
    tip.textContent = words;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(4, event.clientY - box.height - 12) + "px";
  };
  const overMark = (event) => {
    const mark = event.target.closest?.("[data-tip]");
    mark ? place(event, mark.dataset.tip) : (tip.textContent = "");
  };
  addEventListener("pointermove", overMark);
  addEventListener("pointerdown", overMark);
  addEventListener("scroll", () => (tip.textContent = ""), { passive: true });

  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    const now = themes[(themes.indexOf(document.documentElement.dataset.theme || "auto") + 1) % 3];
    now === "auto" ? delete document.documentElement.dataset.theme : (document.documentElement.dataset.theme = now);
    button.textContent = "theme: " + now;
  });

  for (const heat of document.querySelectorAll(".heat")) {
    const data = JSON.parse(heat.querySelector("script").textContent);
    const [byUse, byId] = heat.querySelectorAll("img");
    const reading = heat.querySelector(".reading");
    const toggle = heat.closest("figure").querySelector(".heat-order");
    toggle.addEventListener("click", () => {
      const id = toggle.getAttribute("aria-pressed") !== "true";
      toggle.setAttribute("aria-pressed", id);
      byUse.hidden = id;
      byId.hidden = !id;
    });
    heat.addEventListener("pointermove", (event) => {
      if (event.target.tagName !== "IMG") return;
      const box = event.target.getBoundingClientRect();
      const clamp = (value, size) => Math.min(size - 1, Math.max(0, Math.floor(value * size)));
      const row = clamp((event.clientY - box.top) / box.height, data.uses.length);
      const column = clamp((event.clientX - box.left) / box.width, data.uses[0].length);
      const expert = byUse.hidden ? column : data.order[row][column];
      reading.textContent = `Layer ${data.layers[row]}, expert ${expert}: ${data.uses[row][expert]} uses` +
        (byUse.hidden ? "" : ` (number ${column + 1} of its layer)`);
    });
  }
})();
