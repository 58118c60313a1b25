"""`make chart`: generates parts of chart/, deploy/ and docs/ from the code. Tests compare them."""

from scripts import chart_deploy, chart_manifests, chart_values, routes


def main() -> None:
    for part in (routes, chart_values, chart_manifests, chart_deploy):  # each reads the files of the previous ones
        for path, text in part.written().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main()
