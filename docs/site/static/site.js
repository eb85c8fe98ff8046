// Figures lead to themselves in full size: many are wider than the column of text.
document.addEventListener("DOMContentLoaded", () => {
  for (const image of document.querySelectorAll("article img")) {
    if (image.closest("a")) continue;
    const link = document.createElement("a");
    link.href = image.src;
    link.title = "full size";
    image.replaceWith(link);
    link.append(image);
  }
});
